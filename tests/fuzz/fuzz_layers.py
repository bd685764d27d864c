"""Single layers: every kind of layer, sketch, planner, shape, dtype, layout and history."""

from __future__ import annotations

import copy
import pickle
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

import fuzz_sketches
import sketchprop as sp
from fuzz_base import Nothing, by_shape, drawing, filled, holds, mean, pick, same
from sketchprop.layers import SketchedModule
from sketchprop.layers.choose import refusal

TOLERANCE = {
    torch.float64: 1e-9,
    torch.float32: 1e-4,
    torch.bfloat16: 0.1,
    torch.float16: 0.03,
}
KINDS = ("linear", "linear", "conv1d", "conv2d", "attention", "attention across", "Conv1D")
STEPS = ("eval", "exact", "budget 0.5", "budget 1", "budget 1.0", "deepcopy", "pickle", "state",
         "unsketch", "no grad", "backward")  # fmt: skip


class Sketched:
    """What layers and models share: gradients, and the laws of any history."""

    seed: int
    sketch: Any
    steps: tuple[str, ...]
    planner: Any = None
    dtype: torch.dtype
    autocast: bool
    tolerance: float
    forward: Callable[..., Tensor]
    sketched: Callable[..., nn.Module]

    def gradients(
        self, model: nn.Module, inputs: Sequence[Tensor], G: Tensor, wants: Any = None
    ) -> list[Tensor | None]:
        leaves = wants or leaves_of(model, inputs)
        return list(torch.autograd.grad(self.forward(model, inputs), leaves, G, allow_unused=True))

    def budget_one(
        self, plain: nn.Module, inputs: Sequence[Tensor], G: Tensor, truth: list[Any]
    ) -> None:
        model = self.sketched(plain)
        with sp.exact(model):
            same("exact", self.gradients(model, inputs, G), truth)
        whole = at_budget_one(self.sketch)
        found = self.gradients(self.sketched(plain, whole), inputs, G)
        same("budget one", found, truth, self.tolerance if by_nonzero(self.sketch) else 0.0)

    def one_pass(self, plain: nn.Module, inputs: Sequence[Tensor], G: Tensor) -> list[Any]:
        """All gradients; some of them alone, and all of them once more, are the same."""
        model = self.sketched(plain)
        leaves = leaves_of(model, inputs)
        whole = self.gradients(model, inputs, G)
        same_kinds(whole, leaves)
        some = sorted(random.Random(self.seed).sample(range(len(leaves)), (len(leaves) + 1) // 2))
        if self.planner is not None:
            model = self.sketched(plain)
            leaves = leaves_of(model, inputs)
        part = self.gradients(model, inputs, G, [leaves[i] for i in some])
        same("a part", part, [whole[i] for i in some], self.tolerance)
        if self.planner is None:
            y = self.forward(model, inputs)
            for _ in range(2):
                again = torch.autograd.grad(y, leaves, G, retain_graph=True, allow_unused=True)
                same("again", again, whole, self.tolerance)
        return whole

    def mean(self, model: nn.Module, inputs: Sequence[Tensor], G: Tensor, truth: list[Any]) -> None:
        if self.dtype != torch.float64 or self.autocast:
            return
        if self.planner is not None:  # it has served another gradient before
            self.gradients(model, inputs, G.flip(0) if G.dim() else G)

        def one() -> list[Tensor]:
            own = copy.deepcopy(model) if self.planner is not None else model
            return filled(self.gradients(own, inputs, G), leaves_of(own, inputs))

        found = mean(one)
        if found is not None:
            same("mean", found, filled(truth, leaves_of(model, inputs)), self.tolerance)

    def history(self, plain: nn.Module, inputs: Sequence[Tensor], G: Tensor) -> None:
        """After any history a model does what a new one does with the same budget."""
        model, sketch = self.sketched(plain), self.sketch
        keys = list(plain.state_dict())
        for step in self.steps:
            model, sketch = self._step(step, model, sketch, plain, inputs, G)
            holds("state", list(model.state_dict()) == keys, step)
            if self.planner is None:
                with drawing(by_shape(self.seed)):
                    found = self.gradients(model, inputs, G)
                    new = self.gradients(self.sketched(plain, sketch), inputs, G)
                same(f"history {step}", found, new, self.tolerance)
        holds("taken", any(isinstance(m, SketchedModule) for m in model.modules()))
        sp.unsketch_(model)
        for a, b in zip(model.modules(), plain.modules(), strict=True):
            holds("unsketch", type(a) is type(b) and vars(a).keys() == vars(b).keys())
        same("unsketch", self.gradients(model, inputs, G), self.gradients(plain, inputs, G))

    def _step(
        self, step: str, model: nn.Module, sketch: Any, plain: nn.Module, inputs: Any, G: Tensor
    ) -> tuple[nn.Module, Any]:
        if step == "eval":
            truth = self.gradients(plain.eval(), inputs, G)
            same("eval", self.gradients(model.eval(), inputs, G), truth)
            plain.train(), model.train()
        elif step == "exact":
            with sp.exact(model):
                truth = self.gradients(plain, inputs, G)
                same("exact", self.gradients(model, inputs, G), truth)
                model = copy.deepcopy(model)
        elif step == "no grad":
            with torch.no_grad():
                holds("no grad", not self.forward(model, inputs).requires_grad)
        elif step == "backward":
            self.forward(model, inputs).backward(G)
            forget(leaves_of(model, inputs))
        elif step == "step":  # of SGD, taken over by the plain model
            self.forward(model, inputs).backward(G)
            torch.optim.SGD(model.parameters(), 0.01).step()
            forget(leaves_of(model, inputs))
            plain.load_state_dict(model.state_dict())
        elif step == "unsketch":
            sp.unsketch_(model)
            truth = self.gradients(plain, inputs, G)
            same("unsketch", self.gradients(model, inputs, G), truth)
            model = self.sketched(model, sketch)
        elif step.startswith("budget"):
            sketch = sketch.with_budget(budget_of(step))
            sp.set_budget_(model, budget_of(step))
        elif step == "deepcopy":
            model = copy.deepcopy(model)
        elif step == "pickle":
            model = pickle.loads(pickle.dumps(model))
        elif step == "state":
            other = self.sketched(plain, sketch)
            other.load_state_dict(model.state_dict())
            plain.load_state_dict(other.state_dict())
            model = other
        return model, sketch


def forget(leaves: Sequence[Tensor]) -> None:
    for leaf in leaves:
        leaf.grad = None


@dataclass(frozen=True)
class Layer(Sketched):
    """One layer by itself, and what is done to it."""

    seed: int
    kind: str
    sketch: Any
    planner: Any = None
    rows: tuple[int, ...] = (3,)
    """Sizes before the features; of convolutions samples and positions."""
    widths: tuple[int, int] = (4, 3)
    """Inputs and outputs."""
    kernel: tuple[int, int, int, int] = (1, 1, 0, 1)
    """Kernel, stride, padding, dilation."""
    bias: bool = True
    dtype: torch.dtype = torch.float64
    layout: str = "contiguous"
    direction: str = "normal"
    """The gradient of the output."""
    frozen: str = ""
    autocast: bool = False
    device: str = "cpu"
    steps: tuple[str, ...] = ()

    simplest: ClassVar[dict[str, Any]] = {
        "kind": "linear", "planner": None, "rows": (3,), "widths": (2, 2), "kernel": (1, 1, 0, 1),
        "bias": False, "dtype": torch.float64, "layout": "contiguous", "direction": "normal",
        "frozen": "", "device": "cpu",
    }  # fmt: skip

    @classmethod
    def random(cls, rng: random.Random) -> Self:
        kind = pick(rng, *KINDS)
        sizes = {"linear": rng.randint(0, 3), "conv1d": 2, "conv2d": 3}.get(kind, 2)
        if kind == "Conv1D":
            sizes = rng.randint(1, 2)
        rows = tuple(pick(rng, 1, 2, 3, 4, 5) for _ in range(sizes))
        if rows and rng.random() < 0.08:
            rows = (*rows[:-1], 0) if rng.random() < 0.5 else (0, *rows[1:])
        sketch = fuzz_sketches.of_layer(rng)
        dtype = pick(rng, *[torch.float64] * 4, torch.float32, torch.bfloat16, torch.float16)
        return cls(
            seed=rng.randrange(1000),
            kind=kind,
            sketch=sketch,
            planner=fuzz_sketches.planner(rng, sketch),
            rows=rows,
            widths=(pick(rng, 1, 2, 4, 6), pick(rng, 1, 2, 3, 5)),
            kernel=(pick(rng, 1, 1, 2, 3), pick(rng, 1, 2), pick(rng, 0, 0, 1), pick(rng, 1, 1, 2)),
            bias=rng.random() < 0.7,
            dtype=dtype,
            layout=pick(
                rng, "contiguous", "contiguous", "transposed", "expanded", "strided", "last"
            ),
            direction=pick(
                rng, "normal", "normal", "zero rows", "zero", "tiny", "constant", "expanded",
                "transposed", "zero columns", "one heavy",
            ),
            frozen=pick(rng, "", "", "", "x", "weight", "bias"),
            autocast=rng.random() < 0.15,
            device="meta" if rng.random() < 0.06 else "cpu",
            steps=tuple(pick(rng, *STEPS) for _ in range(rng.randint(0, 3))),
        )  # fmt: skip

    # --- what is tried ---

    def plain(self) -> nn.Module:
        """The plain layer, in a container as in a model."""
        torch.manual_seed(self.seed)
        d, n = self.widths
        k, stride, padding, dilation = self.kernel
        layer: nn.Module
        if self.kind == "linear":
            layer = nn.Linear(d, n, bias=self.bias)
        elif self.kind == "Conv1D":
            layer = Conv1D(n, d)
        elif self.kind.startswith("conv"):
            kind = nn.Conv1d if self.kind == "conv1d" else nn.Conv2d
            layer = kind(d, n, k, stride, padding, dilation, bias=self.bias)
        else:
            across = self.kind == "attention across"
            layer = nn.MultiheadAttention(
                d, 1 if d % 2 else 2, bias=self.bias, batch_first=self.seed % 2 == 0,
                add_bias_kv=self.seed % 7 == 0, kdim=n if across else None,
                vdim=n if across else None,
            )  # fmt: skip
        for name, p in layer.named_parameters():
            p.requires_grad_(not (self.frozen and self.frozen in name))
        layer.to(self.dtype)
        return nn.Sequential(layer).to(self.device)

    def inputs(self) -> tuple[Tensor, ...]:
        torch.manual_seed(self.seed + 1)
        d, n = self.widths
        shape = (*self.rows, d)
        if self.kind.startswith("conv"):
            shape = (self.rows[0], d, *self.rows[1:])
        x = laid_out(shape, self.layout, self.dtype).to(self.device)
        x = x.detach().requires_grad_(self.frozen != "x")
        if self.kind != "attention across":
            return (x,)
        shape = (*self.rows[:-1], 3) if self.seed % 2 == 0 else (3, *self.rows[1:])
        memory = torch.randn(*shape, n, dtype=self.dtype, device=self.device)
        return x, memory.requires_grad_(self.frozen != "x")

    def sketched(self, plain: nn.Module, sketch: Any = None, planner: bool = True) -> nn.Module:
        return sp.sketch_(
            copy.deepcopy(plain),
            self.sketch if sketch is None else sketch,
            sp.select.everything,
            planner=self.planner if planner else None,
        )

    def forward(self, model: nn.Module, inputs: Sequence[Tensor]) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
            if not self.kind.startswith("attention"):
                return model(*inputs)  # type: ignore[no-any-return]
            x, memory = inputs[0], inputs[-1]
            y: Tensor = model[0](x, memory, memory, need_weights=self.seed % 3 == 0)[0]
            return y

    # --- the laws ---

    @property
    def tolerance(self) -> float:  # type: ignore[override]
        return TOLERANCE[torch.bfloat16 if self.autocast else self.dtype]

    def check(self) -> None:
        plain, inputs = self.plain(), self.inputs()
        reason = refusal(plain[0], self.sketch, self.planner)  # type: ignore[index]
        if reason:
            self._refused(plain)
            raise Nothing(reason)
        try:
            y = self.forward(plain, inputs)
        except RuntimeError as error:  # shapes that torch itself refuses
            raise Nothing(str(error)) from None
        model = self.sketched(plain)
        if not leaves_of(model, inputs):
            return
        G = gradient_like(y, self.direction, self.seed + 2)
        before = torch.get_rng_state()
        z = self.forward(model, inputs)
        attention = self.kind.startswith("attention")
        closely = self.tolerance if attention else 0.0
        if self.device == "meta":
            holds("meta", z.device.type == "meta" and z.shape == y.shape)
            same_kinds(self.gradients(model, inputs, G), leaves_of(model, inputs))
            return
        same("forward", [z.detach()], [y.detach()], closely)
        if not draws_in_forward(self.sketch):
            holds("forward draws nothing", torch.equal(before, torch.get_rng_state()))
        truth = self.gradients(plain, inputs, G)
        self.budget_one(plain, inputs, G, truth)
        self._zeros_and_nonfinite(model, plain, inputs, G)
        self._passes(plain, inputs, G)
        self.mean(model, inputs, G, truth)
        self.history(plain, inputs, G)

    def _refused(self, plain: nn.Module) -> None:
        try:
            self.sketched(plain)
        except ValueError:
            return
        raise AssertionError("refusal: sketch_ took a layer that is said to be refused")

    def _zeros_and_nonfinite(
        self, model: nn.Module, plain: nn.Module, inputs: Sequence[Tensor], G: Tensor
    ) -> None:
        model = copy.deepcopy(model)
        for grad in self.gradients(model, inputs, torch.zeros_like(G)):
            holds("zeros", grad is None or not grad.any(), grad)
        if not G.numel():
            return
        rng = random.Random(self.seed)
        for value in (float("nan"), float("inf")):
            bad = torch.ones_like(G).contiguous()
            bad.view(-1)[rng.randrange(bad.numel())] = value
            with drawing(by_shape(self.seed)):
                found = self.gradients(model, inputs, bad)
            truth = self.gradients(plain, inputs, bad)
            if self.kind.startswith("conv"):
                # A kernel that meets nothing but padding: which 0 · NaN torch computes there
                # depends on its algorithm, and that on the number of samples.
                seen = self.gradients(plain, inputs, (~bad.isfinite()).to(bad.dtype))
                truth = [
                    t if s is None or s.any() else None for t, s in zip(truth, seen, strict=True)
                ]
            see_what_is_not_finite(found, truth)

    def _passes(self, plain: nn.Module, inputs: Sequence[Tensor], G: Tensor) -> None:
        """Some gradients, in two passes, twice, into ``.grad``: all as in one pass."""

        with drawing(by_shape(self.seed)):
            whole = self.one_pass(plain, inputs, G)
            model = self.sketched(plain)
            forget(leaves_of(model, inputs))
            for _ in range(2):
                self.forward(model, inputs).backward(G)
            if not self.planner:
                sums = [None if g is None else 2 * g for g in whole]
                grads = [leaf.grad for leaf in leaves_of(model, inputs)]
                same("accumulation", grads, sums, 3 * self.tolerance)
        forget(inputs)
        if self.kind.startswith("attention"):
            return  # several draws, whose order depends on what is asked for
        torch.manual_seed(self.seed)
        whole = self.gradients(self.sketched(plain), inputs, G)
        model = self.sketched(plain)
        leaves = leaves_of(model, inputs)
        torch.manual_seed(self.seed)
        y = self.forward(model, inputs)
        found = [
            torch.autograd.grad(y, leaf, G, retain_graph=True, allow_unused=True)[0]
            for leaf in leaves
        ]
        same("one draw for all", found, whole, self.tolerance)


def budget_of(step: str) -> float | int:
    word = step.split()[1]
    return float(word) if "." in word else int(word)


def leaves_of(model: nn.Module, inputs: Sequence[Tensor] | Tensor) -> list[Tensor]:
    given = (inputs,) if isinstance(inputs, Tensor) else inputs
    return [t for t in (*given, *model.parameters()) if t.requires_grad]


def same_kinds(grads: Sequence[Tensor | None], leaves: Sequence[Tensor]) -> None:
    for grad, leaf in zip(grads, leaves, strict=True):
        if grad is not None:
            holds("kinds", grad.shape == leaf.shape and grad.dtype == leaf.dtype, grad.dtype)
            holds("kinds", grad.device == leaf.device, grad.device)
            holds("kinds", not grad.requires_grad)


def see_what_is_not_finite(found: Sequence[Tensor | None], truth: Sequence[Tensor | None]) -> None:
    """No gradient is finite where the exact one is not, whatever was dropped."""
    for place, (grad, exact) in enumerate(zip(found, truth, strict=True)):
        if grad is not None and exact is not None and not exact.isfinite().all():
            holds("not finite", not grad.isfinite().all(), place, grad)


def draws_in_forward(sketch: Any) -> bool:
    if isinstance(sketch, sp.Split):
        return sketch.forward is not None
    return "G" not in sketch.sees


def at_budget_one(sketch: Any) -> Any:
    """The same with everything kept."""
    if isinstance(sketch, sp.Tokens):
        return replace(sketch, budget=1.0, queries=None, keys=None)
    if isinstance(sketch, sp.Split):
        sides = [None if s is None else at_budget_one(s) for s in (sketch.input, sketch.weight)]
        return replace(sketch, input=sides[0], weight=sides[1])
    return sketch.with_budget(1.0)


def by_nonzero(sketch: Any) -> bool:
    sides = sketch.sides if isinstance(sketch, sp.Split) else [sketch]
    return any(getattr(side, "by", "") == "nonzero" for side in sides)


def laid_out(shape: tuple[int, ...], layout: str, dtype: torch.dtype) -> Tensor:
    """Random numbers in a layout of memory."""
    x = torch.randn(shape).to(dtype)
    if layout == "transposed" and len(shape) > 1:
        return x.transpose(0, -1).contiguous().transpose(0, -1)
    if layout == "expanded" and shape[0]:
        return x[:1].expand(shape)
    if layout == "strided":
        wide = torch.randn(*shape[:-1], 2 * shape[-1]).to(dtype)
        return wide[..., ::2]
    if layout == "last" and len(shape) == 4:
        return x.contiguous(memory_format=torch.channels_last)
    if layout == "last":
        return torch.randn(2, *shape).to(dtype)[1]
    return x


def gradient_like(y: Tensor, content: str, seed: int) -> Tensor:
    """A gradient for ``y``, of a kind."""
    torch.manual_seed(seed)
    G = torch.randn(y.shape).to(y.dtype)
    if content == "zero rows" and G.dim() > 1 and G.shape[0]:
        G[torch.rand(G.shape[0]) < 0.5] = 0
    elif content == "zero columns" and G.dim():
        G[..., torch.rand(G.shape[-1]) < 0.5] = 0
    elif content == "zero":
        G.zero_()
    elif content == "tiny":
        G *= 1e-4 if y.dtype == torch.float16 else 1e-20
    elif content == "one heavy" and G.numel():
        G.view(-1)[0] = 1e3
    elif content == "one token" and G.shape[1] > 1:
        G[:, 1:] = 0
    elif content == "padding" and G.shape[0] > 1:
        G[0] = 0
    elif content == "constant":
        G.fill_(1.0)
    elif content == "expanded":
        G = torch.ones((), dtype=y.dtype).expand(y.shape)
    elif content == "transposed" and G.dim() > 1:
        G = G.transpose(0, -1).contiguous().transpose(0, -1)
    return G.to(y.device)
