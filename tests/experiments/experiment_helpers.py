"""What several tests of the experiments share."""

from dataclasses import fields, replace

from experiments.lab.sweep import Protocol


def changed(protocol: Protocol, **settings) -> Protocol:
    """With other values, each of which belongs to the protocol or to its cell."""
    names = {field.name for field in fields(protocol.base)}
    cell = {k: v for k, v in settings.items() if k in names}
    rest = {k: v for k, v in settings.items() if k not in names}
    return replace(protocol, **rest, base=replace(protocol.base, **cell))
