"""Numbers as people say them."""

from __future__ import annotations

import math

ABSURD = 1000
"""From here on a factor is not worth its digits."""


def ratio(value: float) -> str:
    """Three decimals for what is close to 1, fewer for large factors.

    >>> ratio(0.5412), ratio(78.608), ratio(136.145), ratio(74964.0)
    ('0.541 ×', '78.6 ×', '136 ×', 'over 1000 ×')
    """
    if not value < ABSURD:
        return f"over {ABSURD} ×"
    decimals = 3 if value < 10 else 1 if value < 100 else 0
    return f"{value:.{decimals}f} ×"


def with_error(value: float, error: float) -> str:
    """A factor and its standard error.

    >>> with_error(0.9, 0.12), with_error(1.5, math.inf)
    ('0.900 ± 0.12 ×', '1.500 ± ? ×')
    """
    if not value < ABSURD:
        return ratio(value)
    shown = f"{error:.2g}" if math.isfinite(error) else "?"
    return f"{ratio(value).removesuffix(' ×')} ± {shown} ×"


def amount(value: float, unit: str) -> str:
    """Three figures and a prefix: how people read bytes, FLOPs and seconds.

    >>> amount(70_700, "B"), amount(2.02e9, "FLOP"), amount(12, "B"), amount(0.0051, "s")
    ('70.7 kB', '2.02 GFLOP', '12 B', '5.1 ms')
    """
    prefixes = {1e12: "T", 1e9: "G", 1e6: "M", 1e3: "k", 1.0: "", 1e-3: "m", 1e-6: "µ"}
    size, prefix = next(((s, p) for s, p in prefixes.items() if value >= s), (1.0, ""))
    return f"{value / size:.3g} {prefix}{unit}"


def change_in_words(change: float, what: str) -> str:
    """A factor as people say it.

    >>> change_in_words(0.7, "time"), change_in_words(1.25, "time"), change_in_words(3.2, "time")
    ('30 % less time', '25 % more time', '3.2 times the time')
    >>> change_in_words(74964.0, "time")
    'over 1000 times the time'
    """
    if not change < ABSURD:
        return f"over {ABSURD} times the {what}"
    if change >= 2:
        return f"{change:.3g} times the {what}"
    share = abs(change - 1)
    if share < 0.005:
        return f"the same {what}"
    return f"{100 * share:.0f} % {'less' if change < 1 else 'more'} {what}"
