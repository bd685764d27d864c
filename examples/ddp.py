"""Data parallelism with kept tokens: sketch first, then wrap; each rank has its own draws.

On one machine:    torchrun --nproc-per-node 2 examples/ddp.py
On two machines:   torchrun --nnodes 2 --nproc-per-node 1 --rdzv-backend c10d \
                       --rdzv-endpoint HOST:29500 examples/ddp.py

--share is for slow links: columns of linear layers instead of tokens, the same on all ranks, so
that only kept rows of the gradients are all-reduced. That saves bytes and costs accuracy.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

import sketchprop as sp
from sketchprop.distributed import share_draws_
from sketchprop.zoo import ViT


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--budget", type=float, default=0.2, help="1.0 is exact, bit by bit")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--share", action="store_true", help="fewer bytes, much more noise")
    args = parser.parse_args()

    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    rank = dist.get_rank()
    device = torch.device("cuda", rank % torch.cuda.device_count()) if cuda else torch.device("cpu")

    torch.manual_seed(0)
    model = ViT(image=16, patch=4, dim=64, depth=2, heads=2, hidden=128).to(device)
    sp.sketch_(model, sp.L1(args.budget) if args.share else sp.Tokens(args.budget))
    wrapped = DistributedDataParallel(model)
    shared = share_draws_(wrapped) if args.share else None
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-3)

    torch.manual_seed(rank + 1)  # own data, own draws
    for step in range(args.steps):
        images = torch.randn(64, 3, 16, 16, device=device)
        loss = F.cross_entropy(wrapped(images), images[:, 0, 0, :10].argmax(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0 and step % 5 == 0:
            bytes_ = f"; {shared.counter.take().total.ratio:.3f} of the bytes" if shared else ""
            print(f"step {step}: loss {loss:.4f}{bytes_}")
        elif shared:
            shared.counter.take()
    dist.barrier()  # one rank that leaves early can let the other wait for ever
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
