"""The whole backward pass on a few samples: drawn by the gradient of the loss at the output."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from ..core.checks import check_budget, solve_dtype
from ..core.probabilities import water_fill
from ..core.sampling import Uniforms, draw, draw_uniforms
from .passes import first_pass, second_pass

BY = ("gradient", "uniform")


def sampled_loss(
    model: nn.Module | Callable[..., Any],
    loss_fn: Callable[[Any, Any], Tensor],
    inputs: Any,
    targets: Any,
    budget: float | int,
    *,
    by: str = "gradient",
    sample_dim: int = 0,
    uniforms: Uniforms = draw_uniforms,
) -> Tensor:
    """The loss of the whole batch, with a gradient that comes from a few samples; unbiased.

    ``model`` runs on all samples without a graph; G, the gradient of the loss at its output, says
    what each sample carries. ``budget`` of the samples (a share, or a number) are drawn, p ∝ ‖G_s‖
    (``by="uniform"``: equal where G_s ≠ 0), and ``model`` runs again on those, with a
    graph. The gradient is Σ J_sᵀG_s/p_s over the kept ones, and what the loss owes to anything but
    the outputs (a learned temperature, a regulariser, targets with a graph) is added exactly. Its
    mean is the exact gradient, for any loss of the outputs, as long as the model treats each
    sample for itself. Cost (1 + 3p)/3 of exact, activations p.

        loss = sampled_loss(model, F.cross_entropy, x, y, 0.1)
        loss.backward()                       # or scaler.scale(loss / k).backward()

    ``inputs``: a tensor, a tuple of arguments, or a mapping of keyword arguments; tensors with as
    many entries along ``sample_dim`` as the first one are taken apart by samples, also among the
    outputs. ``loss_fn(output, targets)``: a scalar, computed once, on float16 outputs in float32.
    In Lightning return it from ``training_step``; for transformers there is ``SampledTrainer``;
    DDP, autocast and ``torch.compile`` need nothing. Random operations of the model (dropout) give
    the kept samples the same numbers in both passes, or are refused: compiled dropout, dropout
    inside activation checkpointing, and generators of the model's own (those it holds as
    attributes are seen). BatchNorm in training mode mixes samples and is refused. What a forward
    pass leaves in the model instead of returning it has no graph: return auxiliary outputs, one
    for each sample. In evaluation mode, under ``no_grad`` and where all samples are kept it is the
    plain loss. ``uniforms``: where the draw's random numbers come from, torch's default generator.
    """
    _check_options(by, sample_dim)
    inputs = dict(inputs) if isinstance(inputs, Mapping) else inputs
    samples, r = kept_samples(inputs, budget, sample_dim)
    in_evaluation = isinstance(model, nn.Module) and not model.training
    if r >= samples or in_evaluation or not torch.is_grad_enabled():
        return loss_fn(_call(model, inputs), targets)
    if isinstance(model, nn.Module):
        _refuse_batch_norm(model)
    device = _tensors(inputs)[0].device
    outputs, randomness = first_pass(model, partial(_call, model, inputs), samples, device)
    loss, grads = _loss_gradient(loss_fn, outputs, targets, samples, sample_dim)
    p = water_fill(_sample_norms(grads, by, sample_dim), r)
    kept, scale = draw(p, r, uniforms=uniforms)

    def pick(x: Any) -> Any:
        return x.index_select(sample_dim, kept.to(x.device)) if _has(x, samples, sample_dim) else x

    few = tree_map(pick, inputs)
    again = second_pass(partial(_call, model, few), randomness, kept)
    parts, seeds = [], []
    for part, grad in zip(_differentiable(again), grads, strict=True):
        if grad is not None:
            parts.append(part)
            seeds.append(_seed(grad, kept, scale, sample_dim))
            _check_shape(part, seeds[-1], samples)
    return _FewSamples.apply(loss, len(seeds), *seeds, *parts)  # type: ignore[no-any-return, no-untyped-call]


def sampled_backward(
    model: nn.Module | Callable[..., Any],
    loss_fn: Callable[[Any, Any], Tensor],
    inputs: Any,
    targets: Any,
    budget: float | int,
    **options: Any,
) -> Tensor:
    """``sampled_loss(...).backward()``: adds to ``.grad``, returns the loss of the whole batch.

    ``model``, ``loss_fn``, ``inputs``, ``targets``, ``budget`` and ``options`` are those of
    ``sampled_loss``.

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


class _FewSamples(torch.autograd.Function):
    """The value of the loss; its gradient goes on to the loss's own graph and to the kept samples.

    Seeds are multiplied by the incoming gradient in float32 or better and only then rounded to an
    output's dtype: a loss scale passes through as it does in exact training.
    """

    @staticmethod
    def forward(ctx: Any, loss: Tensor, count: int, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors[:count])
        ctx.dtypes = [part.dtype for part in tensors[count:]]
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # create_graph=True
            raise RuntimeError(
                "sampled_loss has no second derivative: G is a number in its backward pass. Leave "
                "out create_graph=True, or take the plain loss for a penalty on the gradient"
            )
        seeds = ctx.saved_tensors
        scaled = [
            (seed * grad.to(seed.device, solve_dtype(grad))).to(dtype)
            for seed, dtype in zip(seeds, ctx.dtypes, strict=True)
        ]
        own = grad if ctx.needs_input_grad[0] else None
        return (own, None, *(None for _ in seeds), *scaled)


def _loss_gradient(
    loss_fn: Callable[[Any, Any], Tensor], outputs: Any, targets: Any, samples: int, dim: int
) -> tuple[Tensor, list[Tensor | None]]:
    """The loss of the whole batch and its gradient at each output that has one.

    The loss keeps its graph only where that leads to something else than the outputs.
    """
    leaves: list[Tensor] = []

    def leaf(x: Any) -> Any:
        if not _can_differentiate(x):
            return x
        # Without a loss scale a gradient in float16 underflows.
        wide = x.detach().float() if x.dtype == torch.float16 else x.detach()
        leaves.append(wide.requires_grad_())
        return leaves[-1]

    loss = loss_fn(tree_map(leaf, outputs), targets)
    if not isinstance(loss, Tensor) or loss.dim() != 0:
        raise ValueError(
            f"loss_fn returned {type(loss).__name__} of shape {tuple(getattr(loss, 'shape', ()))}; "
            "return a scalar tensor, computed from the outputs"
        )
    grads: list[Tensor | None] = []
    if loss.requires_grad:
        leads_elsewhere = _leads_elsewhere(loss, leaves)
        with torch.autocast(loss.device.type, enabled=False):
            found = torch.autograd.grad(
                loss, leaves, allow_unused=True, retain_graph=leads_elsewhere
            )
        grads = list(found)
        loss = loss if leads_elsewhere else loss.detach()
    if all(grad is None for grad in grads):
        raise ValueError(
            "the loss does not depend on the outputs that loss_fn was given; compute it in "
            "loss_fn(output, targets) instead of taking one that the model has made"
        )
    for x, grad in zip(leaves, grads, strict=True):
        if grad is not None and not _has(x, samples, dim):
            raise ValueError(
                f"the loss depends on an output of shape {tuple(x.shape)} that has no axis of "
                f"{samples} samples at {dim}: its gradient cannot be shared out among samples"
            )
    return loss, grads


def _leads_elsewhere(loss: Tensor, leaves: list[Tensor]) -> bool:
    """Whether the graph of the loss reaches a leaf that is not an output."""
    outputs = {id(leaf) for leaf in leaves}
    seen, waiting = set(), [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable") and id(node.variable) not in outputs:
            return True
        waiting.extend(following for following, _ in node.next_functions)
    return False


def _sample_norms(grads: list[Tensor | None], by: str, dim: int) -> Tensor:
    """√w for each sample, over all outputs; zero only where its gradient is zero: O(size of G)."""
    norms = []
    for grad in grads:
        if grad is None or not grad.numel():
            continue
        rows = grad.movedim(dim, 0).reshape(grad.shape[dim], -1)
        dtype = None if grad.is_complex() else solve_dtype(grad)
        largest = torch.linalg.vector_norm(rows, ord=float("inf"), dim=-1, dtype=dtype)
        if by == "uniform":
            norms.append((largest > 0).to(largest.dtype) + 0 * largest)
        else:  # never below the largest entry: squares of small ones underflow
            norm = torch.linalg.vector_norm(rows, dim=-1, dtype=dtype)
            norms.append(torch.maximum(norm, largest))
    together = torch.stack([norm.to(norms[0].device) for norm in norms])
    return together.amax(0) if by == "uniform" else torch.linalg.vector_norm(together, dim=0)


def _seed(grad: Tensor, kept: Tensor, scale: Tensor, dim: int) -> Tensor:
    """G_s/p_s for the kept samples, in float32 or better."""
    rows = grad.index_select(dim, kept.to(grad.device))
    shape = [1] * rows.dim()
    shape[dim] = -1
    factor = scale.to(grad.device).view(shape)
    if rows.is_complex():
        return rows * factor.to(rows.real.dtype)
    return rows.to(solve_dtype(grad)) * factor.to(solve_dtype(grad))


def kept_samples(inputs: Any, budget: float | int, sample_dim: int = 0) -> tuple[int, int]:
    """How many samples there are in ``inputs``, and how many of them ``budget`` keeps."""
    budget = check_budget(budget)
    tensors = [x for x in _tensors(inputs) if x.dim() > sample_dim]
    if not tensors:
        raise TypeError(
            f"inputs={type(inputs).__name__} has no tensor with an axis {sample_dim} of samples; "
            "give a tensor, a tuple of arguments or a mapping of keyword arguments"
        )
    samples = tensors[0].shape[sample_dim]
    kept = budget if isinstance(budget, int) else max(1, round(budget * samples))
    return samples, min(kept, samples)


def _call(model: Callable[..., Any], inputs: Any) -> Any:
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple | list) else model(inputs)


def _check_options(by: str, sample_dim: int) -> None:
    if by not in BY:
        raise ValueError(f"by={by!r} is unknown; use by='gradient' or 'uniform'")
    if isinstance(sample_dim, bool) or not isinstance(sample_dim, int) or sample_dim < 0:
        raise ValueError(
            f"sample_dim={sample_dim!r} is no axis counted from the front; give 0 for inputs like "
            "[samples, features], 1 for [time, samples, features]"
        )


def _check_shape(part: Tensor, seed: Tensor, samples: int) -> None:
    if part.shape != seed.shape:
        raise ValueError(
            f"the output of the kept samples has the shape {tuple(part.shape)}, and in the output "
            f"of all {samples} samples they have {tuple(seed.shape)}; the model must treat each "
            "sample for itself, whatever the others are (padding to the longest of a batch "
            "belongs into the data loader)"
        )


def _refuse_batch_norm(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training:
            raise ValueError(
                f"{name!r} is a {type(module).__name__} in training mode: it mixes the samples of "
                "a batch, and the second pass would see another batch. Freeze it with "
                f"model.get_submodule({name!r}).eval(), or use LayerNorm or "
                "GroupNorm"
            )


def _tensors(tree: Any) -> list[Tensor]:
    return [x for x in tree_leaves(tree) if isinstance(x, Tensor)]


def _differentiable(tree: Any) -> list[Tensor]:
    return [x for x in tree_leaves(tree) if _can_differentiate(x)]


def _can_differentiate(x: Any) -> bool:
    return isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex())


def _has(x: Any, samples: int, dim: int) -> bool:
    return isinstance(x, Tensor) and x.dim() > dim and x.shape[dim] == samples
