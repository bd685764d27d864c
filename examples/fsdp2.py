"""FSDP2 with sketched layers: sketch first, then shard; each rank has its own draws.

On one machine:    torchrun --nproc-per-node 2 examples/fsdp2.py
On two machines:   torchrun --nnodes 2 --nproc-per-node 1 --rdzv-backend c10d \
                       --rdzv-endpoint HOST:29500 examples/fsdp2.py
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import sketchprop as sp


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--budget", type=float, default=0.1, help="1.0 is exact, bit by bit")
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
    model = nn.Sequential(
        nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)
    ).to(device)
    sp.sketch_(model, sp.L1(args.budget))
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    torch.manual_seed(rank + 1)  # own data, own draws
    for step in range(args.steps):
        x = torch.randn(128, 64, device=device)
        loss = F.cross_entropy(model(x), x[:, :10].argmax(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0 and step % 5 == 0:
            print(f"step {step}: loss {loss:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
