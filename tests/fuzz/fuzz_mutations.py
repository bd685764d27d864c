"""One thing in a known model that is not as it was shipped."""

from __future__ import annotations

import functools
import random
from typing import Any

import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, nn


class TwiceLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class TwiceNorm(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class Mixing(nn.Module):
    """In the place of an activation or a dropout: it looks at other tokens."""

    def forward(self, x: Tensor) -> Tensor:
        return x + x.mean(-2, keepdim=True)


class Wrapped(nn.Module):
    """In the place of a norm: around it, with a parameter of its own."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.eps = inner, getattr(inner, "eps", None)  # torch asks in eval mode
        self.gain = nn.Parameter(torch.full((), 1.5))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x)
        return y * self.gain


def twice(module: Any, *args: Any, **kwargs: Any) -> Any:
    """A forward in the place of a module's own."""
    y = type(module).forward(module, *args, **kwargs)
    return (2 * y[0], *y[1:]) if isinstance(y, tuple) else 2 * y


def twice_behind(module: nn.Module, args: Any, y: Any) -> Any:
    """A hook."""
    return (2 * y[0], *y[1:]) if isinstance(y, tuple) else 2 * y


MUTATIONS = ("subclass", "method", "hook", "mixing", "wrapped norm", "adapter", "eager")


def mutate(model: nn.Module, name: str, seed: int) -> None:
    """Changes one module, chosen at random; nothing where there is none of its kind."""
    rng = random.Random(seed)
    modules = {n: m for n, m in model.named_modules() if n}
    body = getattr(model, "model", None)
    if name == "eager":
        if hasattr(body, "set_attn_implementation"):
            body.set_attn_implementation("eager")  # type: ignore[union-attr, operator]
        return
    if name == "adapter":
        linear = [n for n, m in modules.items() if type(m) is nn.Linear and "out_proj" not in n]
        if linear:
            config = LoraConfig(r=1, target_modules=[rng.choice(linear)], init_lora_weights=False)
            inject_adapter_in_model(config, model)
        return
    kinds: dict[str, Any] = {
        "subclass": (nn.Linear, nn.LayerNorm),
        "mixing": (nn.Dropout, nn.GELU, nn.ReLU),
        "wrapped norm": (nn.LayerNorm,),
    }
    fits = [n for n, m in modules.items() if name not in kinds or type(m) in kinds[name]]
    if not fits:
        return
    place = rng.choice(fits)
    module = modules[place]
    if name == "subclass":
        module.__class__ = TwiceLinear if type(module) is nn.Linear else TwiceNorm
    elif name == "method":
        module.forward = functools.partial(twice, module)
    elif name == "hook":
        module.register_forward_hook(twice_behind)
    else:
        parent, _, last = place.rpartition(".")
        setattr(
            model.get_submodule(parent), last, Mixing() if name == "mixing" else Wrapped(module)
        )
