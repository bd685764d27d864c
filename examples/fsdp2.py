"""FSDP2 with kept tokens: sketch first, then shard; each rank has its own draws.

On one machine:    torchrun --nproc-per-node 2 examples/fsdp2.py
On two machines:   torchrun --nnodes 2 --nproc-per-node 1 --rdzv-backend c10d \
                       --rdzv-endpoint HOST:29500 examples/fsdp2.py
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import sketchprop as sp
from sketchprop.zoo import ViT


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--budget", type=float, default=0.2, help="1.0 is exact, bit by bit")
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()

    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    rank = dist.get_rank()
    if cuda:
        torch.cuda.set_device(rank % torch.cuda.device_count())
    device = torch.device("cuda" if cuda else "cpu")
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))

    torch.manual_seed(0)
    model = ViT(image=16, patch=4, dim=64, depth=2, heads=2, hidden=128).to(device)
    sp.sketch_(model, sp.Tokens(args.budget))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    torch.manual_seed(rank + 1)  # own data, own draws
    for step in range(args.steps):
        images = torch.randn(64, 3, 16, 16, device=device)
        loss = F.cross_entropy(model(images), images[:, 0, 0, :10].argmax(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0 and step % 5 == 0:
            print(f"step {step}: loss {loss:.4f}")
    dist.barrier()  # one rank that leaves early can let the other wait for ever
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
