"""The whole backward pass on a few samples: drawn by the gradient of the loss at the output."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from ..core.probabilities import water_fill
from ..core.sampling import draw_uniforms, systematic
from ..sketches import Rows
from .replay import Recorder, random_state, replayed, same_state, set_random_state


def sampled_loss(
    model: nn.Module | Callable[..., Any],
    loss_fn: Callable[[Any, Any], Tensor],
    inputs: Any,
    targets: Any,
    budget: float | int,
    *,
    weights: str = "gradient",
    sample_dim: int = 0,
    u: Tensor | None = None,
) -> Tensor:
    """The loss of the whole batch, with a gradient that comes from a few samples; unbiased.

    ``model`` runs on all samples without a graph; G, the gradient of the loss at its output, says
    what each sample carries. ``budget`` of the samples (a share, or a number) are drawn, p ∝ ‖G_s‖
    (``weights="uniform"``: equal), and ``model`` runs again on those, with a graph. The gradient is
    Σ J_sᵀG_s/p_s over the kept ones: its mean is the exact one, for any loss of the outputs, as
    long as the model treats each sample for itself. Cost (1 + 3p)/3 of exact, activations p.

        loss = sampled_loss(model, F.cross_entropy, x, y, 0.1)
        loss.backward()                       # or scaler.scale(loss / k).backward()

    ``inputs``: a tensor, a tuple of arguments, or a mapping of keyword arguments; tensors with as
    many entries along ``sample_dim`` as the first one are taken apart by samples, also among the
    outputs. ``loss_fn(output, targets)``: a scalar. In ``Trainer`` return it from
    ``compute_loss``, in Lightning from ``training_step``; DDP, autocast and ``torch.compile``
    need nothing. Dropout has the same masks in both passes (not in compiled code, and not inside
    activation checkpointing: an error says so). BatchNorm in training mode mixes the samples of a
    batch and is refused. In evaluation mode, under ``no_grad`` and where all samples are kept it
    is the plain loss.
    """
    if weights not in ("gradient", "uniform"):
        raise ValueError(f"weights={weights!r} is unknown; use weights='gradient' or 'uniform'")
    sketch = Rows(budget, weights=weights)
    inputs = dict(inputs) if isinstance(inputs, Mapping) else inputs
    samples = _samples(inputs, sample_dim)
    r = int(sketch.rank(samples))
    if r >= samples or not torch.is_grad_enabled():
        return loss_fn(_call(model, inputs), targets)
    if isinstance(model, nn.Module):
        _refuse_batch_norm(model)
    device = _tensors(inputs)[0].device
    start = random_state(device)
    with torch.no_grad():
        outputs, recorder = _first_pass(model, inputs, device, start)
    whole, grads = _loss_gradient(loss_fn, outputs, targets, samples, sample_dim)
    rows = [grad.movedim(sample_dim, 0).flatten(1) for grad in grads if grad is not None]
    norms = torch.stack([sketch._roots(part, None) for part in rows])
    roots = norms.amax(0) if weights == "uniform" else torch.linalg.vector_norm(norms, dim=0)
    p = water_fill(roots, r)
    if u is None:
        u = draw_uniforms(p, ())
    kept = systematic(p, u, r)
    scale = p[kept].reciprocal()

    def pick(x: Any) -> Any:
        return x.index_select(sample_dim, kept.to(x.device)) if _has(x, samples, sample_dim) else x

    with replayed(recorder, start, kept, samples):
        again = _call(model, tree_map(pick, inputs))
    surrogate = whole.new_zeros(())
    for part, grad in zip(_floats(again), grads, strict=True):
        if grad is not None:
            shape = [1] * part.dim()
            shape[sample_dim] = r
            seed = grad.index_select(sample_dim, kept) * scale.view(shape)
            surrogate = surrogate + (part * seed.to(part.dtype)).sum()
    return whole + (surrogate - surrogate.detach()).to(whole.dtype)


def sampled_backward(
    model: nn.Module | Callable[..., Any],
    loss_fn: Callable[[Any, Any], Tensor],
    inputs: Any,
    targets: Any,
    budget: float | int,
    **options: Any,
) -> Tensor:
    """``sampled_loss(...).backward()``: adds to ``.grad``, returns the loss of the whole batch.

    >>> net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
    >>> x, y = torch.randn(100, 8), torch.randint(0, 2, (100,))
    >>> loss = sampled_backward(net, nn.functional.cross_entropy, x, y, budget=0.1)
    >>> bool(torch.isclose(loss, nn.functional.cross_entropy(net(x), y)))
    True
    """
    loss = sampled_loss(model, loss_fn, inputs, targets, budget, **options)
    with torch.autocast(loss.device.type, enabled=False):
        loss.backward()  # type: ignore[no-untyped-call]
    return loss.detach()


def _call(model: Callable[..., Any], inputs: Any) -> Any:
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple | list) else model(inputs)


def _first_pass(
    model: Callable[..., Any], inputs: Any, device: torch.device, start: Any
) -> tuple[Any, Recorder | None]:
    """The outputs of all samples, and what was random on the way."""
    if not _looks_random(model):
        outputs = _call(model, inputs)
        if same_state(start, random_state(device)):
            return outputs, None
        set_random_state(start, device)
    recorder = Recorder(device)
    with recorder:
        outputs = _call(model, inputs)
    if not recorder.saw_all(start, random_state(device)):
        raise RuntimeError(
            "the model draws random numbers that sampled_loss cannot repeat for the kept samples "
            "(in compiled code, or from a generator of its own); run it without torch.compile or "
            "without dropout"
        )
    return outputs, recorder


def _looks_random(model: Any) -> bool:
    """A guess that saves a second first pass when it is right."""
    if not isinstance(model, nn.Module):
        return False
    for module in model.modules():
        rate = getattr(module, "p", getattr(module, "dropout", 0))
        if module.training and isinstance(rate, float) and rate > 0:
            return True
    return False


def _loss_gradient(
    loss_fn: Callable[[Any, Any], Tensor], outputs: Any, targets: Any, samples: int, dim: int
) -> tuple[Tensor, list[Tensor | None]]:
    """The loss of the whole batch and its gradient at each output that has one."""
    leaves: list[Tensor] = []

    def leaf(x: Any) -> Any:
        if not isinstance(x, Tensor) or not x.is_floating_point():
            return x
        leaves.append(x.detach().requires_grad_())
        return leaves[-1]

    given = tree_map(leaf, outputs)
    with torch.enable_grad():
        loss = loss_fn(given, targets)
    if not isinstance(loss, Tensor) or loss.dim() != 0:
        raise ValueError(
            f"loss_fn returned {type(loss).__name__} of shape {tuple(getattr(loss, 'shape', ()))}; "
            "return a scalar tensor, computed from the outputs"
        )
    if not loss.requires_grad:
        raise ValueError(
            "the loss does not depend on the outputs that loss_fn was given; compute it in "
            "loss_fn(output, targets) instead of taking one that the model has made"
        )
    grads: list[Tensor | None] = list(torch.autograd.grad(loss, leaves, allow_unused=True))
    for x, grad in zip(leaves, grads, strict=True):
        if grad is not None and not _has(x, samples, dim):
            raise ValueError(
                f"the loss depends on an output of shape {tuple(x.shape)} that has no axis of "
                f"{samples} samples at {dim}: its gradient cannot be shared out among samples"
            )
    return loss.detach(), grads


def _refuse_batch_norm(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training:
            raise ValueError(
                f"{name!r} is a {type(module).__name__} in training mode: it mixes the samples of "
                "a batch, and the second pass would see another batch. Freeze it with "
                f"model.get_submodule({name!r}).eval(), use LayerNorm or GroupNorm, or sketch the "
                "layers instead: sketch_(model, Rows(0.1))"
            )


def _samples(inputs: Any, dim: int) -> int:
    tensors = [x for x in _tensors(inputs) if x.dim() > dim]
    if not tensors:
        raise TypeError(
            f"inputs={type(inputs).__name__} has no tensor with an axis {dim} of samples; give a "
            "tensor, a tuple of arguments or a mapping of keyword arguments"
        )
    return tensors[0].shape[dim]


def _tensors(tree: Any) -> list[Tensor]:
    return [x for x in tree_leaves(tree) if isinstance(x, Tensor)]


def _floats(tree: Any) -> list[Tensor]:
    return [x for x in tree_leaves(tree) if isinstance(x, Tensor) and x.is_floating_point()]


def _has(x: Any, samples: int, dim: int) -> bool:
    return isinstance(x, Tensor) and x.dim() > dim and x.shape[dim] == samples
