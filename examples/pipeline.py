"""A model over two pipeline stages with sketched gradients between them.

On one machine:    torchrun --nproc-per-node 2 examples/pipeline.py
On two machines:   torchrun --nnodes 2 --nproc-per-node 1 --rdzv-backend c10d \
                       --rdzv-endpoint HOST:29500 examples/pipeline.py
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import sketchprop as sp
from sketchprop.distributed import sketch_stage_

WIDTH, TOKENS, BATCH = 256, 128, 32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--budget", type=float, default=0.1, help="1.0 is exact, bit by bit")
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()

    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", rank % torch.cuda.device_count()) if cuda else torch.device("cpu")
    torch.manual_seed(rank)

    # One stage on each process; Rows keeps the tokens that carry most of the gradient.
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)).to(device)
    stage = sketch_stage_(PipelineStage(module, rank, world, device), sp.Rows(args.budget))
    schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=F.mse_loss)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)

    for step in range(args.steps):
        data = torch.Generator().manual_seed(step)  # the same batch on every process
        x = torch.randn(BATCH, TOKENS, WIDTH, generator=data).to(device)
        target = x.roll(1, -1) if stage.is_last else None
        losses: list[torch.Tensor] = []
        optimizer.zero_grad()
        schedule.step(*((x,) if stage.is_first else ()), target=target, losses=losses)
        optimizer.step()
        sent = stage.counter.take().total
        if stage.is_last and step % 5 == 0:
            print(
                f"step {step}: loss {torch.stack(losses).mean():.4f}, backward messages "
                f"{sent.sent:,} of {sent.exact:,} bytes ({sent.ratio:.3f})"
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
