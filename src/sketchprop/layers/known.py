"""Which class a layer's class becomes: one shared class per type, never one per layer."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import TypeVar

from torch import nn

from .attention import SketchedMultiheadAttention
from .blocks import SketchedBlock
from .blocks_torch import SketchedTransformerDecoderLayer, SketchedTransformerEncoderLayer
from .conv import SketchedConv1d, SketchedConv2d
from .sketched import SketchedLinear, SketchedModule

BUILT_IN: Mapping[type[nn.Module], type[SketchedModule]] = {
    sketched.plain: sketched
    for sketched in (SketchedLinear, SketchedConv1d, SketchedConv2d, SketchedMultiheadAttention)
}

BLOCKS: Mapping[type[nn.Module], type[SketchedBlock]] = {
    sketched.plain: sketched
    for sketched in (SketchedTransformerEncoderLayer, SketchedTransformerDecoderLayer)
}

_MARK = "__sketched_class__"
_BLOCK_MARK = "__sketched_block__"

Sketched = TypeVar("Sketched", bound=type[SketchedModule])


def sketchable(layer: type[nn.Module]) -> Callable[[Sketched], Sketched]:
    """Lets ``sketch_`` turn your own ``layer`` into the class that this decorates.

    That class is a ``SketchedModule`` and a ``layer``, without state of its own; its forward is
    the layer's unless ``self.is_sketching()``. Only ``layer`` itself is taken, not its subclasses.
    The mark is kept on ``layer``: nothing is shared with other layers. A class that is a
    ``SketchedBlock`` makes ``layer`` a block that ``Tokens`` takes whole: see ``layers.blocks``.

    >>> from sketchprop import sketched_linear
    >>> class Doubled(nn.Linear):
    ...     def forward(self, x):
    ...         return 2 * super().forward(x)
    >>> @sketchable(Doubled)
    ... class SketchedDoubled(SketchedModule, Doubled):
    ...     def forward(self, x):
    ...         if not self.is_sketching():
    ...             return super().forward(x)
    ...         return 2 * sketched_linear(x, self.weight, self.bias, self.sketch)
    """
    if not (isinstance(layer, type) and issubclass(layer, nn.Module)):
        raise TypeError(f"sketchable({layer!r}): give the class of a layer, @sketchable(MyLayer)")
    if layer in BUILT_IN or layer in BLOCKS or issubclass(layer, SketchedModule):
        raise ValueError(
            f"{layer.__name__} can be sketched already; decorate a class for a layer of your own"
        )

    def register(sketched: Sketched) -> Sketched:
        if not (issubclass(sketched, SketchedModule) and issubclass(sketched, layer)):
            raise TypeError(
                f"{sketched.__name__} must be both: class {sketched.__name__}(SketchedModule, "
                f"{layer.__name__})"
            )
        if sketched.__mro__.index(SketchedModule) > sketched.__mro__.index(layer):
            raise TypeError(
                f"SketchedModule must come first: class {sketched.__name__}(SketchedModule, "
                f"{layer.__name__})"
            )
        sketched.plain = layer
        setattr(layer, _BLOCK_MARK if issubclass(sketched, SketchedBlock) else _MARK, sketched)
        return sketched

    return register


def sketched_class(layer: type[nn.Module]) -> type[SketchedModule] | None:
    """The class that ``layer`` becomes, or that it is; ``None`` if ``sketch_`` does not know it.

    Subclasses are not taken for their parents: they may compute something else.
    """
    if issubclass(layer, SketchedModule):
        return None if issubclass(layer, SketchedBlock) else layer
    if layer in BUILT_IN:
        return BUILT_IN[layer]
    marked: type[SketchedModule] | None = vars(layer).get(_MARK)
    loaded = sys.modules.get("transformers.pytorch_utils")
    if marked is None and loaded is not None and layer is getattr(loaded, "Conv1D", None):
        from .gpt2 import SketchedConv1D

        return SketchedConv1D
    return marked


def block_class(block: type[nn.Module]) -> type[SketchedBlock] | None:
    """The class that a transformer's block becomes, or that it is; ``None`` if it is not known."""
    if issubclass(block, SketchedBlock):
        return block
    if block in BLOCKS:
        return BLOCKS[block]
    own: type[SketchedBlock] | None = vars(block).get(_BLOCK_MARK)
    if own is not None or not block.__module__.startswith("transformers.models."):
        return own
    from .blocks_transformers import block_of

    return block_of(block)
