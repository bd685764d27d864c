"""What fits a model: the sketches that are worth trying on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from ...layers.choose import choose
from ...layers.select import blocks_of, everything, sketchable_layers
from ...layers.transform import sketch_
from ...layers.validate import findings
from ...sketches import L1, AnySketch, Rows, Tokens
from ..noise.gradients import Loss, one_pass
from ..restore import call_hooks

FEW_ZEROS = 0.05
"""Rows of zeros, below which it is not worth looking for them."""
MANY_ZEROS = 0.6
"""Rows that are not zero, below which keeping all of them is tried."""
MANY_LABELS = 0.5
"""Rows of a head that are not zero, from which on each token seems to have its own label."""
ALIKE = 0.8
"""‖Σ_t g_t‖² over n Σ‖g_t‖² of a sample's tokens, from which on they share a label: 1 below a mean,
about 0.02 with a label for each."""
CALM = 0.05
"""Noise of the first kept tokens, below which fewer of them are tried than more."""

Model = TypeVar("Model", bound=nn.Module)


@dataclass(frozen=True)
class Candidate:
    """A sketch, and whether the last layer is taken too; or one that takes blocks."""

    sketch: AnySketch
    everywhere: bool = False
    of_blocks: bool = False
    compile: bool = False
    calm: bool | None = None
    """Whether it is tried only where the first candidate has little noise, or only where it has
    more."""

    def follows(self, noise: float | None) -> bool:
        """Whether it is tried where the first candidate has so much noise."""
        return self.calm is None or noise is None or self.calm == (noise < CALM)

    @property
    def name(self) -> str:
        return repr(self.sketch)

    @property
    def line(self) -> str:
        """What to paste."""
        rule = ", sp.select.everything" if self.everywhere else ""
        compiled = ", compile=True" if self.compile else ""
        return f"sp.sketch_(model, sp.{self.sketch!r}{rule}{compiled})"

    def apply_(self, model: Model) -> Model:
        rule = everything if self.everywhere else None
        return sketch_(model, self.sketch, rule, compile=self.compile)


def candidates(
    model: nn.Module, live: float, compile: bool = False
) -> tuple[list[Candidate], list[str]]:
    """What fits the model, the most promising first; and what else there is to say of it.

    ``live``: the share of rows of G that are not zero. Rows of zeros cost nothing to leave out,
    and a budget is a share of all rows: with half of them padding 0.15 keeps what 0.3 would.
    ``compile``: only blocks, which ``sketch_`` compiles.
    """
    share = live if live < 1 - FEW_ZEROS else 1.0
    free = [Candidate(Rows(1.0, by="nonzero"))] if share < 1 else []
    # Nothing is surer than what adds no noise.
    fitting = [*free] if share <= MANY_ZEROS else []
    if blocks_of(model):
        # Where most rows are zero, all others can be kept for little.
        budgets = (0.3, 0.5, 0.1, 0.2) if share > MANY_ZEROS else (1.1, 0.6, 0.3)
        calm = {0.5: False, 0.1: True}
        fitting += [
            Candidate(Tokens(_part(p * share)), of_blocks=True, calm=calm.get(p)) for p in budgets
        ]
    fitting += [] if share <= MANY_ZEROS else free
    fitting += [
        Candidate(Rows(_part(0.3 * share))),
        Candidate(Rows(0.3, unit="sample"), everywhere=True),
    ]
    fitting.append(Candidate(L1(0.3)))
    if compile:
        fitting = [replace(c, compile=True) for c in fitting if c.of_blocks]
    harmless: list[Candidate] = []
    warnings: dict[str, str] = {}
    for candidate in {c.name: c for c in fitting}.values():
        rule = everything if candidate.everywhere else None
        found = findings(model, choose(model, candidate.sketch, rule))
        harm = {f.name: f"{f}. Such sketches were not tried" for f in found if f.level == "harm"}
        warnings |= {name: text for name, text in harm.items() if name not in warnings}
        if not harm:
            harmless.append(candidate)
    return harmless, list(warnings.values())


def _part(share: float) -> float:
    return max(0.001, round(share, 3))


class Rowed(NamedTuple):
    """What one exact pass shows of the rows of G."""

    live: float
    """The share that is not zero, the median over linear layers."""
    labelled: bool
    """Whether most tokens of the last linear layer have a gradient, each one of its own."""
    per_label: float
    """Rows that are not zero, the median over linear layers, over the labels that the last one
    tells of: tokens that share a label."""


def rows_seen(model: nn.Module, loss_fn: Loss, batches: Sequence[Any]) -> Rowed:
    """Which rows of G are not zero; one exact pass, or two if the first batch has no label. Where a
    gradient reaches hardly a layer, as below a head of zeros, all rows count.

    Rows of padding are zero in all layers; where one token is read, most rows of the last block.
    A head that still has a row for each token belongs to a loss for each token.
    """
    shares: list[Tensor] = []
    counts: list[int] = []
    labels: list[Tensor] = []
    tokens: list[bool] = []

    def watch(layer: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        first = output[0] if isinstance(output, tuple) else output
        if isinstance(first, Tensor) and first.requires_grad and first.dim() > 1:
            first.register_hook(look)  # type: ignore[no-untyped-call]

    def look(G: Tensor) -> None:
        shares.append((G.abs().amax(-1) != 0).float().mean())
        counts.append(G.numel() // max(1, G.shape[-1]))
        labels.append(_labels(G))
        tokens.append(G.dim() > 2 and G.shape[-2] > 1)

    kernels = nn.Conv1d | nn.Conv2d
    linear = [m for m in sketchable_layers(model).values() if not isinstance(m, kernels)]
    trained = [p for p in model.parameters() if p.requires_grad]
    live: list[float] = []
    with call_hooks(linear, after=watch):
        for batch in batches[:2]:
            for seen in (shares, counts, labels, tokens):
                seen.clear()
            one_pass(loss_fn, model, batch, trained)
            live = list(map(float, shares))
            if live and median(live) > 0:
                break
    if not live:
        return Rowed(1.0, False, 1.0)
    # Backward meets the last layer first.
    rows = [count * share for count, share in zip(counts, live, strict=True)]
    own = float(labels[0])
    labelled = tokens[0] and live[0] > MANY_LABELS and own > rows[0] / 2
    return Rowed(median(live) or 1.0, labelled, median(rows) / max(1.0, own))


def _labels(G: Tensor) -> Tensor:
    """Of how many labels rows of G tell: each of its own, or a sample of one, where its tokens have
    about the same gradient, as below their mean."""
    live = G.abs().amax(-1) != 0
    if G.dim() < 3:
        return live.sum()
    alike = G.sum(-2).square().sum() > ALIKE * (live.sum(-1) * G.square().sum((-1, -2))).sum()
    return torch.where(alike, live.any(-1).sum(), live.sum())
