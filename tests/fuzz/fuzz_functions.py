"""The functions that users call themselves: branches, kept attention, gates, stacks, losses."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fuzz_sketches
import sketchprop as sp
from fuzz_base import Nothing, by_shape, drawing, filled, holds, mean, pick, same
from fuzz_layers import TOLERANCE, gradient_like, laid_out, same_kinds, see_what_is_not_finite
from sketchprop.tokens.draw import kept_count

KINDS = ("branch", "branch", "attention", "attention", "gate", "stack")
WIDTH = 4
_ONE_COLUMN = sp.L1(1)


class Gated(nn.Module):
    """A row-wise module whose steps nobody knows."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate = nn.Linear(WIDTH, 3), nn.Linear(WIDTH, 3)
        self.down = nn.Linear(3, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(F.softplus(self.gate(x)) * F.silu(self.up(x), inplace=True))
        return y


PARTS: dict[str, Callable[[float], nn.Module]] = {
    "linear": lambda dropout: nn.Linear(WIDTH, WIDTH, bias=False),
    "norm": lambda dropout: nn.LayerNorm(WIDTH),
    "rms": lambda dropout: nn.RMSNorm(WIDTH, eps=1e-6),
    "gelu": lambda dropout: nn.GELU(),
    "relu": lambda dropout: nn.ReLU(),
    "in place": lambda dropout: nn.SiLU(inplace=True),
    "drop": nn.Dropout,
    "gated": lambda dropout: Gated(),
    "same": nn.Identity,
    "tanh": lambda dropout: nn.Tanh(),
}
"""Row-wise modules."""


@dataclass(frozen=True)
class Function:
    """One function, its arguments, and what its gradients are asked for."""

    seed: int
    kind: str
    sketch: Any = _ONE_COLUMN
    budget: float | int = 0.5
    sizes: tuple[int, int, int] = (2, 3, 2)
    """Samples, tokens, heads."""
    parts: tuple[str, ...] = ("linear",)
    dropout: float = 0.0
    mask: str = ""
    residual: bool = False
    save: str = "activations"
    keys: int = 3
    """Keys of attention, by how many there are more than queries if there is no causal mask."""
    grouped: bool = False
    capacity: float = 1.0
    dtype: torch.dtype = torch.float64
    layout: str = "contiguous"
    direction: str = "normal"
    frozen: bool = False
    autocast: bool = False
    device: str = "cpu"

    simplest: ClassVar[dict[str, Any]] = {
        "dropout": 0.0, "mask": "", "save": "activations", "keys": 1, "capacity": 1.0,
        "dtype": torch.float64, "layout": "contiguous", "direction": "normal", "device": "cpu",
        "sizes": (1, 2, 1), "budget": 1, "sketch": _ONE_COLUMN, "parts": ("linear",),
    }  # fmt: skip

    @classmethod
    def random(cls, rng: random.Random) -> Self:
        kind = pick(rng, *KINDS)
        budget = fuzz_sketches.budget(rng)
        sketch = pick(rng, fuzz_sketches.columns, fuzz_sketches.rows, fuzz_sketches.spectral)(rng)
        return cls(
            seed=rng.randrange(1000),
            kind=kind,
            sketch=fuzz_sketches.of_layer(rng) if kind == "stack" else sketch,
            budget=budget,
            sizes=(pick(rng, 0, 1, 2, 3), pick(rng, 1, 2, 3, 5), pick(rng, 1, 2, 4)),
            parts=tuple(pick(rng, *PARTS) for _ in range(rng.randint(1, 4))),
            dropout=pick(rng, 0.0, 0.0, 0.4),
            mask=pick(rng, "", "", "causal", "boolean", "added", "of all"),
            residual=rng.random() < 0.4,
            save=pick(rng, "activations", "input"),
            keys=pick(rng, 1, 2, 4),
            grouped=rng.random() < 0.3,
            capacity=pick(rng, 1.0, 1.25, 2.0),
            dtype=pick(rng, *[torch.float64] * 4, torch.float32, torch.bfloat16),
            layout=pick(rng, "contiguous", "contiguous", "transposed", "expanded", "strided"),
            direction=pick(
                rng, "normal", "normal", "zero rows", "zero", "expanded", "transposed", "one heavy"
            ),
            frozen=rng.random() < 0.2,
            autocast=rng.random() < 0.1,
            device="meta" if rng.random() < 0.06 else "cpu",
        )

    # --- what is tried: a sketched function, the exact one, and what they depend on ---

    def made(self) -> tuple[Callable[[], Tensor], Callable[[], Tensor], list[Tensor], bool]:
        """Sketched, exact, leaves, and whether nothing is dropped."""
        torch.manual_seed(self.seed)
        return getattr(self, f"_{self.kind}")()  # type: ignore[no-any-return]

    def _input(self, *shape: int) -> Tensor:
        x = laid_out(shape, self.layout, self.dtype).detach().to(self.device)
        return x.requires_grad_(not self.frozen)

    def _branch(self) -> Any:
        N, T, _ = self.sizes
        # Masks of dropout are drawn in the order of memory, and a branch has its own. It refuses
        # to run what drops out again.
        replayed = self.layout == "contiguous" and "gated" not in self.parts
        drops = self.dropout if replayed else 0.0
        modules = [PARTS[name](drops) for name in self.parts]
        if self.parts[:1] == ("in place",):
            modules.insert(0, nn.Linear(WIDTH, WIDTH))  # a leaf cannot be changed in place
        f: Any = nn.Sequential(*modules).to(self.dtype).to(self.device)
        if self.seed % 5 == 0:
            f = modules[0].to(self.dtype).to(self.device)
        x = self._input(N, T, WIDTH)
        leaves = [t for t in (x, *f.parameters()) if t.requires_grad]

        def exact() -> Tensor:
            return x + f(x) if self.residual else f(x)  # type: ignore[no-any-return]

        def sketched() -> Tensor:
            return sp.branch(f, x, self.budget, save=self.save, residual=self.residual)

        return sketched, exact, leaves, self.budget == 1.0 and isinstance(self.budget, float)

    def _attention(self) -> Any:
        N, T, H = self.sizes
        few = 1 if self.grouped else H
        S = T if self.mask == "causal" else T + self.keys - 1
        q, k, v = (self._input(N, h, length, 3) for h, length in ((H, T), (few, S), (few, S)))
        mask: Tensor | None = None
        if self.mask in ("boolean", "added", "of all"):
            mask = torch.rand(N, 1, T, S) < 0.7
            mask[..., 0] = True
            if self.mask == "of all":
                mask = mask[:1].expand(N, H, T, S) if N else mask.expand(N, H, T, S)
            if self.mask != "boolean":
                mask = torch.zeros(mask.shape).masked_fill(~mask, -1e9).to(self.dtype)
            mask = mask.to(self.device)
            if self.layout == "transposed":
                mask = mask.mT.contiguous().mT
        options: dict[str, Any] = {
            "attn_mask": mask, "dropout_p": self.dropout, "is_causal": self.mask == "causal",
            "scale": 0.3 if self.seed % 3 == 0 else None, "enable_gqa": self.grouped,
        }  # fmt: skip
        budget = self.budget

        def sketched() -> Tensor:
            return sp.kept_attention(q, k, v, **options, queries=budget, capacity=self.capacity)

        def exact() -> Tensor:
            # Where all is kept it is torch's own function, whose mask of dropout is another.
            if self.dropout and kept_count(budget, T) < T:
                return self._dropped(q, k, v, options)
            return F.scaled_dot_product_attention(q, k, v, **options)

        leaves = [t for t in (q, k, v) if t.requires_grad]
        return sketched, exact, leaves, kept_count(budget, T) == T

    def _dropped(self, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Tensor:
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
        S = q @ k.mT * (options["scale"] or q.shape[-1] ** -0.5)
        mask = options["attn_mask"]
        if options["is_causal"]:
            mask = torch.ones(S.shape[-2:], dtype=torch.bool, device=S.device).tril()
        if mask is not None and mask.dtype == torch.bool:
            S = S.masked_fill(~mask, -torch.inf)
        elif mask is not None:
            S = S + mask
        return F.dropout(S.softmax(-1), self.dropout) @ v

    def _gate(self) -> Any:
        if "X" in self.sketch.sees:
            raise Nothing("gates see no input")
        N, T, _ = self.sizes
        x = self._input(N, T, WIDTH)
        weight = torch.randn(5, WIDTH, dtype=self.dtype, device=self.device, requires_grad=True)
        leaves = [t for t in (x, weight) if t.requires_grad]

        def exact() -> Tensor:
            return F.linear(x, weight)

        def sketched() -> Tensor:
            return sp.gate(exact(), self.sketch, weight=weight)

        return sketched, exact, leaves, self.sketch.keeps_all(max(1, N * T), 5, WIDTH)

    def _stack(self) -> Any:
        N, T, H = self.sizes
        x = self._input(H, N, T, WIDTH)
        options: Any = {"dtype": self.dtype, "device": self.device, "requires_grad": True}
        weight, bias = torch.randn(H, 3, WIDTH, **options), torch.randn(H, 3, **options)
        leaves = [t for t in (x, weight, bias) if t.requires_grad]

        def exact() -> Tensor:
            y = x.reshape(H, N * T, WIDTH) @ weight.mT + bias.unsqueeze(-2)
            return y.view(H, N, T, 3)

        def sketched() -> Tensor:
            return sp.sketched_linear(x, weight, bias, self.sketch)

        return sketched, exact, leaves, False

    # --- the laws ---

    @property
    def tolerance(self) -> float:
        return 0.3 if self.autocast else 5 * TOLERANCE[self.dtype]

    def _run(self, f: Callable[[], Tensor]) -> Tensor:
        torch.manual_seed(self.seed + 3)
        with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
            return f()

    def check(self) -> None:
        sketched, exact, leaves, keeps_all = self.made()
        if not leaves or (self.kind == "stack" and self.autocast):
            return
        try:
            y = self._run(exact)
            y.backward(torch.zeros_like(y))
        except RuntimeError as error:  # what torch itself refuses
            raise Nothing(str(error)) from None
        y = self._run(exact)
        if self.device == "meta":
            z = self._run(sketched)
            holds("meta", z.device.type == "meta" and z.shape == y.shape)
            G = torch.zeros(z.shape, dtype=z.dtype, device="meta")
            same_kinds(torch.autograd.grad(z, leaves, G, allow_unused=True), leaves)
            return
        G = gradient_like(y, self.direction, self.seed + 2)
        truth = torch.autograd.grad(y, leaves, G, allow_unused=True)
        same("forward", [self._run(sketched).detach()], [y.detach()], self.tolerance)

        def gradients(G: Tensor = G) -> list[Tensor | None]:
            return list(torch.autograd.grad(self._run(sketched), leaves, G, allow_unused=True))

        if keeps_all:
            same("budget one", gradients(), truth, self.tolerance if self.dropout > 0 else 0.0)
        for grad in gradients(torch.zeros_like(G)):
            holds("zeros", grad is None or not grad.any(), grad)
        with drawing(by_shape(self.seed)):
            whole = gradients()
            same_kinds(whole, leaves)
            same("again", gradients(), whole, self.tolerance)
            if G.numel():
                bad = torch.ones_like(G).contiguous()
                bad.view(-1)[self.seed % bad.numel()] = float("nan")
                exact_bad = torch.autograd.grad(self._run(exact), leaves, bad, allow_unused=True)
                see_what_is_not_finite(gradients(bad), exact_bad)
        if self.dtype == torch.float64 and not self.autocast:
            found = mean(lambda: filled(gradients(), leaves))
            if found is not None:
                same("mean", found, filled(truth, leaves), self.tolerance)
