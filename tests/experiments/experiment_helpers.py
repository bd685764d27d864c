"""What several tests of the experiments share."""

from dataclasses import fields, replace

import torch

from experiments.data import Labelled
from experiments.lab.pictures import Parts
from experiments.lab.sweep import Protocol


def changed(protocol: Protocol, **settings) -> Protocol:
    """With other values, each of which belongs to the protocol or to its cell."""
    names = {field.name for field in fields(protocol.base)}
    cell = {k: v for k, v in settings.items() if k in names}
    rest = {k: v for k, v in settings.items() if k not in names}
    return replace(protocol, **rest, base=replace(protocol.base, **cell))


def pictures(train=64, seed=3):
    """Ten classes of a mean colour each, and noise."""
    g = torch.Generator().manual_seed(seed)
    colours = torch.randint(40, 215, (10, 3, 1, 1), generator=g)

    def split(count):
        labels = torch.arange(count) % 10
        noise = torch.randint(-30, 31, (count, 3, 32, 32), generator=g)
        return Labelled((colours[labels] + noise).to(torch.uint8), labels)

    return Parts(split(train), split(40), split(40))


def without(rows, *names):
    """The rows without some of their columns: times differ between equal runs."""
    return [{k: v for k, v in row.items() if k not in names} for row in rows]
