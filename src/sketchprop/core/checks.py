"""Checks of what a user gives: what it was, what is allowed, what to type instead."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping

from torch import Tensor

SAMPLINGS: Mapping[str | None, str] = {
    "fixed": "always the same number of atoms",
    "independent": "one coin per atom",
}


def check_rank(rank: object) -> None:
    if isinstance(rank, bool) or not isinstance(rank, numbers.Real) or not float(rank) > 0:
        raise ValueError(
            f"rank={rank!r} keeps nothing; give the number of atoms to keep, for example rank=8"
        )


def check_budget(budget: object) -> float | int:
    """The budget as a plain ``int`` (a rank) or ``float`` (a kept fraction)."""
    if isinstance(budget, bool) or not isinstance(budget, numbers.Real):
        raise TypeError(
            f"budget={budget!r} is a {type(budget).__name__}; give a kept fraction in (0, 1], "
            "for example 0.1, or a rank, for example 16"
        )
    if isinstance(budget, numbers.Integral):
        if budget < 1:
            raise ValueError(
                f"budget={budget!r} is a rank that keeps nothing; give a rank of at least 1, "
                "for example 16, or a kept fraction in (0, 1], for example 0.1"
            )
        return int(budget)
    value = float(budget)
    if math.isnan(value) or not 0.0 < value <= 1.0:
        hint = (
            f"for a rank of {int(value)} type budget={int(value)}"
            if value > 1 and value.is_integer() and math.isfinite(value)
            else "for example 0.1; or give a rank as an integer, for example 16"
        )
        raise ValueError(f"budget={budget!r} is not a kept fraction in (0, 1]; {hint}")
    return value


def check_choice(option: str, value: object, choices: Mapping[str | None, str]) -> None:
    """Refuses a value that is none of ``choices``, each named with what it means."""
    if value not in choices:
        listed = [f"{choice!r} ({meaning})" for choice, meaning in choices.items()]
        known = f"{', '.join(listed[:-1])} or {listed[-1]}"
        raise ValueError(f"{option}={value!r} is unknown; use {option}={known}")


def check_share(name: str, rows: object) -> None:
    whole = isinstance(rows, numbers.Integral) and not isinstance(rows, bool)
    if not isinstance(rows, numbers.Real) or isinstance(rows, bool):
        raise TypeError(f"{name}={rows!r}; give a share in (0, 1] or a number of rows")
    if float(rows) <= 0 or math.isnan(float(rows)) or (not whole and float(rows) > 1):
        raise ValueError(
            f"{name}={rows!r}; give a share of the rows in (0, 1], for example 0.1, or a "
            "number of rows, for example 256"
        )


def check_count(name: str, count: object, what: str) -> None:
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ValueError(f"{name}={count!r}; give {what}, an integer of at least 1")


def check_given(given: Tensor | None, sketch: object, what: str, how: str) -> Tensor:
    """The layer's weight or input, at which ``sketch`` looks."""
    if given is None:
        raise TypeError(
            f"{sketch!r} looks at the layer's {what}, and none was given; pass {how}, or use a "
            "sketch that looks at the gradient alone, for example L1 or Rows"
        )
    return given


TENSOR_PARALLEL = (
    "sketches work on whole weights (data parallelism and fully_shard give those). Leave such "
    "layers exact: sketch_(model, sketch, filter_fn=lambda module, name: "
    "not hasattr(module.weight, 'placements'))"
)


def check_local(weight: Tensor, sketch: object) -> None:
    """Refuses a weight that is spread over devices: each would draw for itself alone."""
    if hasattr(weight, "placements"):  # a DTensor, without importing torch.distributed.tensor
        raise NotImplementedError(
            f"{sketch!r} was given a tensor-parallel weight, a DTensor with placements "
            f"{tuple(weight.placements)}; {TENSOR_PARALLEL}"
        )
