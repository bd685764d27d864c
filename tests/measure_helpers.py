"""Networks and batches that the tests of the meters share."""

import torch
import torch.nn.functional as F
from torch import nn


def loss_fn(model, batch):
    x, y = batch
    return F.cross_entropy(model(x), y)


def make_batches(count=3, rows=24, inputs=8, classes=4):
    return [(torch.randn(rows, inputs), torch.randint(0, classes, (rows,))) for _ in range(count)]


class Branched(nn.Module):
    """A fan-out (q and k read one tensor), a product, a residual, a layer used twice, dropout."""

    def __init__(self, width=16, dropout=0.2):
        super().__init__()
        self.a = nn.Linear(8, width)
        self.q = nn.Linear(width, width)
        self.k = nn.Linear(width, width)
        self.o = nn.Linear(width, width)
        self.norm = nn.BatchNorm1d(width)
        self.drop = nn.Dropout(dropout)
        self.head = nn.Linear(width, 4)

    def forward(self, x):
        x = torch.relu(self.a(x))
        y = x + self.o(self.drop(torch.tanh(self.q(x)) * self.k(x)))
        y = y + self.o(self.norm(y))
        return self.head(y)


def mlp():
    return nn.Sequential(
        nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)
    )
