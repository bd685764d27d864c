"""A study: what is trained, what is stored of it, what is drawn and what is claimed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from .claims import Claim
from .selection import Summary
from .store import Row, Schema
from .sweep import Figure, Protocol, Sweep, load_sweep

Parts = Callable[[Mapping[str, Sequence[Summary]], Sequence[Row]], Sequence[str]]


def nothing(found: Mapping[str, Sequence[Summary]], rows: Sequence[Row]) -> Sequence[str]:
    return ()


def told_widening(protocol: Protocol) -> str:
    """What happens at an edge of the grid of learning rates."""
    if _untuned(protocol):
        return "no other is tried"
    whose = "the" if protocol.tuning_seeds else "a seed's"
    if not protocol.widen:
        return f"where {whose} best rate sits at an edge, none beyond it is tried"
    return f"where {whose} best rate sits at an edge, up to {protocol.widen} more beyond it"


def told_choice(protocol: Protocol, tested: str) -> str:
    """What images kept apart are for; ``tested`` names those that give the accuracy."""
    at = f"and the accuracy is that of {tested} at this choice"
    if _untuned(protocol):
        return f"the epoch is chosen on them for each seed, {at}"
    count = protocol.tuning_seeds
    if not count:
        return f"learning rate and epoch are chosen on them for each seed, {at}"
    first = "the first seed" if count == 1 else f"the mean of the first {count} seeds"
    return (
        f"the epoch is chosen on them for each seed, the learning rate once for all seeds, by "
        f"{first}, {at}. Luck in the choice of a rate is common to all seeds: no error below "
        "counts it"
    )


def _untuned(protocol: Protocol) -> bool:
    """One learning rate for all."""
    return len(protocol.learning_rates) == 1 and not protocol.widen


@dataclass(frozen=True)
class Study:
    """All that differs between two studies on one engine, store, figures and page."""

    name: str
    """Also the folder of its presets."""
    title: str
    defaults: Protocol
    figures: Mapping[str, Figure]
    schema: Schema
    claims: tuple[Claim, ...]
    told: Callable[[Protocol], Sequence[str]]
    """How it was trained, in paragraphs for the page."""
    describe: Callable[[Protocol], str]
    """The same in a line, for figures."""
    opening: Parts = nothing
    """What the page says first, from the figures' points and all rows."""
    more: Parts = nothing
    """What it says last."""
    no_claims: frozenset[str] = frozenset()
    """Figures whose points take no part in claims."""

    def load(self, preset: str) -> Sweep:
        """A preset by name, or any TOML file by path."""
        return load_sweep(preset, self.name, self.defaults, self.figures)
