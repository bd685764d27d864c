"""Cases that print as one would paste them, a run over many of them, and the smallest that fails.

A case is a frozen dataclass. ``Case.random(rng)`` makes one, ``case.check()`` asks all of its laws
and raises if one does not hold; everything random in it comes from its own ``seed``.
"""

from __future__ import annotations

import math
import random
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import Field, dataclass, fields, replace
from typing import Any, ClassVar, Protocol, Self

import torch
from torch import Tensor

import sketchprop as sp
from sketchprop.core import enumeration, sampling
from sketchprop.core.sampling import Uniforms
from sketchprop.tokens import draw as token_draw

MOST_DRAWS = 150
"""Above so many outcomes a mean is not summed up: the other laws have to do."""


class Case(Protocol):
    """What a family of cases has; a frozen dataclass."""

    simplest: ClassVar[dict[str, Any]]
    """The simplest value of each field that has one, to shrink to."""

    @classmethod
    def random(cls, rng: random.Random) -> Self: ...

    def check(self) -> None: ...


class Nothing(Exception):  # noqa: N818
    """The case asks for something that is refused with a message, as documented."""


@dataclass(frozen=True)
class Failure:
    """A case that fails, the smallest case that fails in the same way, and how."""

    found: Any
    smallest: Any
    error: str

    def __str__(self) -> str:
        return (
            f"{self.error.strip()}\n\nfound as\n    {self.found!r}\n"
            f"smallest\n    {self.smallest!r}\nrun it again by adding .check()"
        )


def number(family: type[Any], seed: int, index: int) -> Any:
    """The case of that number in the run with that seed."""
    return family.random(random.Random(f"{family.__name__} {seed} {index}"))


def error_of(case: Any) -> BaseException | None:
    """What is wrong with a case, or nothing."""
    try:
        case.check()
    except Nothing:
        return None
    except Exception as error:
        return error
    return None


def run(family: type[Any], seed: int, indices: Sequence[int]) -> Iterator[Failure]:
    """The failures among these cases, each shrunk."""
    for index in indices:
        case = number(family, seed, index)
        error = error_of(case)
        if error is not None:
            smallest, error = shrunk(case, error)
            text = "".join(traceback.format_exception(error)[-6:])
            yield Failure(case, smallest, f"{family.__name__} {index} of seed {seed}\n{text}")


def shrunk(case: Any, error: BaseException, tries: int = 300) -> tuple[Any, BaseException]:
    """The smallest case that fails with the same kind of error, greedily, field by field."""
    smaller, seen = True, {repr(case)}
    while smaller and tries > 0:
        smaller = False
        for candidate in _simpler(case):
            if repr(candidate) in seen:
                continue
            seen.add(repr(candidate))
            tries -= 1
            found = error_of(candidate)
            if found is not None and _alike(found, error):
                case, error, smaller = candidate, found, True
                break
            if tries <= 0:
                break
    return case, error


def _alike(found: BaseException, error: BaseException) -> bool:
    """The same law broken, or the same kind of crash."""
    first = [str(e).split(":")[0] for e in (found, error)]
    return type(found) is type(error) and (
        not isinstance(error, AssertionError) or first[0] == first[1]
    )


def _simpler(case: Any) -> Iterator[Any]:
    for field in fields(case):
        value = getattr(case, field.name)
        for candidate in _candidates(case, field, value):
            if candidate != value or type(candidate) is not type(value):
                try:
                    yield replace(case, **{field.name: candidate})
                except (TypeError, ValueError):
                    continue


def _candidates(case: Any, field: Field[Any], value: Any) -> Iterator[Any]:
    if field.name == "seed":
        return
    if field.name in case.simplest:
        yield case.simplest[field.name]
    if isinstance(value, sp.Sketch | sp.Split | sp.Tokens):
        yield from _simpler_sketches(value)
    elif isinstance(value, bool):
        yield False
    elif isinstance(value, tuple) and all(isinstance(v, int) for v in value):
        for place, size in enumerate(value):
            for less in (1, 2, size // 2, size - 1):
                if 0 <= less < size:
                    yield (*value[:place], less, *value[place + 1 :])
    elif isinstance(value, tuple):
        for place in range(len(value)):
            yield value[:place] + value[place + 1 :]


def _simpler_sketches(sketch: Any) -> Iterator[Any]:
    if isinstance(sketch, sp.Split):
        yield from sketch.sides
    if not isinstance(sketch, sp.Split):
        for field in fields(sketch)[1:]:
            if field.init and getattr(sketch, field.name) != field.default:
                yield replace(sketch, **{field.name: field.default})
        for budget in (1, 2):
            if isinstance(sketch.budget, float) or budget < sketch.budget:
                yield replace(sketch, budget=budget)


# --- draws that the cases choose ---


@contextmanager
def drawing(uniforms: Uniforms) -> Iterator[None]:
    """Every draw inside, wherever it is made, takes its numbers from ``uniforms``."""
    real = sampling.draw

    def draw(p: Tensor, rank: float, kind: str = "fixed", uniforms_: Any = None, **_: Any) -> Any:
        return real(p, rank, kind, uniforms)

    sampling.draw = token_draw.draw = draw  # type: ignore[assignment]
    try:
        yield
    finally:
        sampling.draw = token_draw.draw = real


def by_shape(seed: int) -> Uniforms:
    """Uniforms that depend on their shape alone: two passes over the same draws make them alike."""

    def uniforms(p: Tensor, shape: tuple[int, ...]) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.rand(shape, dtype=torch.float64, generator=generator).to(p.device)

    return uniforms


def mean(run: Callable[[], list[Tensor]]) -> list[Tensor] | None:
    """The exact mean of what ``run`` returns over all of its draws; ``None`` if they are many."""

    def drawn(uniforms: Uniforms) -> tuple[Tensor, ...]:
        with drawing(uniforms):
            return tuple(run())

    return None if _tree(drawn) > MOST_DRAWS else list(enumeration.expectation(drawn))


def _tree(drawn: Callable[[Uniforms], Any]) -> int:
    """The number of outcomes, as far as the first path through the draws tells."""
    size = 1

    def first(p: Tensor, shape: tuple[int, ...]) -> Tensor:
        nonlocal size
        if not p.isfinite().all():
            raise AssertionError(f"probabilities: {p}")
        outcomes = enumeration._outcomes(p.detach(), shape, together=True)
        size *= len(outcomes)
        return outcomes[0][1]

    drawn(first)
    return size


# --- comparing ---


def holds(law: str, condition: bool, *what: object) -> None:
    """Raises with the law's name first: shrinking keeps to one law."""
    if not condition:
        raise AssertionError(": ".join([law, *map(str, what)]))


def same(law: str, found: Sequence[Any], truth: Sequence[Any], tolerance: float = 0.0) -> None:
    """Tensor by tensor: shapes, dtypes, values; ``tolerance`` is relative to the largest of all."""
    holds(law, len(found) == len(truth), len(found), len(truth))
    sizes = [float(t.abs().max()) for t in truth if t is not None and t.numel()]
    scale = max([s for s in sizes if math.isfinite(s)] or [1.0]) or 1.0
    scale = max(scale, 1e-6)  # what cancels leaves rounding of what did not
    for place, (a, b) in enumerate(zip(found, truth, strict=True)):
        holds(law, (a is None) == (b is None), place, "one is missing")
        if a is None:
            continue
        holds(law, a.shape == b.shape and a.dtype == b.dtype, place, a.shape, b.shape, a.dtype)
        if tolerance == 0.0:
            equal = torch.equal(a, b)
            holds(law, equal, place, "" if equal else f"differs by {(a - b).abs().max()}")
        elif a.numel():
            error = float((a.double() - b.double()).abs().max())
            holds(law, error <= tolerance * scale, place, f"differs by {error:.3g} of {scale:.3g}")


def filled(grads: Sequence[Tensor | None], leaves: Sequence[Tensor]) -> list[Tensor]:
    """Zeros where autograd has nothing to say."""
    return [torch.zeros_like(t) if g is None else g for g, t in zip(grads, leaves, strict=True)]


def pick(rng: random.Random, *choices: Any) -> Any:
    return rng.choice(choices)
