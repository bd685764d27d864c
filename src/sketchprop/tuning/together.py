"""Several processes that tune alike: each probes its own batch, and all learn the same mean."""

from __future__ import annotations

import sys
from dataclasses import astuple
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from ..layers.depth import mean_over_processes
from .controller import Probe


def agreed(probe: Probe, device: torch.device) -> Probe:
    """The mean of the probes of all processes, the same numbers in each; alone: the probe.

    One all-reduce of a few numbers. A probe that is not finite somewhere is ignored everywhere.
    """
    numbers, shape = tree_flatten(astuple(probe))
    (means,) = mean_over_processes([numbers], device)
    return Probe(*tree_unflatten(means, shape))


def check_plain(model: nn.Module) -> None:
    """Refuses what cannot be probed, with the way out."""
    name = type(model).__name__
    if isinstance(model, nn.parallel.DistributedDataParallel):
        raise ValueError(
            f"{name} waits for the gradients of each pass, but probes give it none; give the model "
            "inside, Tuner(model.module, loss_fn), in every process: all decide alike"
        )
    sharded: Any = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    if sharded is not None and any(isinstance(m, sharded) for m in model.modules()):
        raise ValueError(
            f"{name} is sharded by fully_shard, whose weights are whole in training steps only; "
            "find budgets on one process with advise, and give them to sketch_"
        )
    compiled: Any = getattr(sys.modules.get("torch._dynamo.eval_frame"), "OptimizedModule", None)
    inside = [n for n, m in model.named_modules() if m._compiled_call_impl is not None]
    if (compiled is not None and isinstance(model, compiled)) or inside:
        raise ValueError(
            f"{name} is compiled, and a probe would compile it again for each layer. Give the "
            "plain model, Tuner(plain, loss_fn), and train compiled = torch.compile(plain): probes "
            "then run eagerly, and each change of a budget compiles once"
        )
