"""The answer of a measurement in plain words."""

from __future__ import annotations

import math

from ..meters import MeasureReport, Verdict


def answer(report: MeasureReport) -> tuple[str, str]:
    """How it looks ("yes", "no", "open") and what it says, in a few words."""
    verdict = report.verdict
    if not report.variance.reliable:
        if verdict.pays:
            return "open", "Not known: more noise than was seen."
        return "no", "No: it does not pay, and there may be more noise than was seen."
    if not (verdict.certain or verdict.cost == verdict.change == 1):
        return "open", "Too close to call."
    return ("yes", "Yes: it pays.") if verdict.pays else ("no", "No: it does not pay.")


def explanation(report: MeasureReport) -> list[str]:
    """Sentences below the answer: cost, noise, both together; what to doubt; the other basis."""
    verdict = report.verdict
    what = "time" if verdict.basis == "time" else "work (FLOPs)"
    sentences = [
        f"A sketched step takes {ratio(verdict.cost)} the {what} of an exact one. Its gradient has "
        f"{ratio(verdict.steps)} the variance, so that SGD needs that many times the steps. "
        f"Together {together(verdict)}: {change_in_words(verdict.change, what)} to the same "
        "accuracy."
    ]
    if report.variance.reliable and not verdict.certain:
        sentences.append(
            "That is within two standard errors of no change: more batches, draws and rounds "
            "would tell."
        )
    if not report.variance.reliable:
        missed = list(report.variance.missed)
        more = ", …" if len(missed) > 3 else ""
        sentences.append(
            f"The mean of the draws misses the exact gradient of {len(missed)} parameters "
            f"({', '.join(missed[:3])}{more}). Either a sketch is biased (sketchprop check tells), "
            "or most of V comes from draws too rare to be met: then V is larger than shown."
        )
    if report.by_time is not None:
        other = report.by_flops
        counted = "it pays" if other.pays else "it does not pay"
        sentences.append(f"Counted in FLOPs instead of time {counted}: {together(other)}.")
    return sentences


def together(verdict: Verdict) -> str:
    """The product of cost and steps with its error."""
    error = f"{verdict.error:.2g}" if math.isfinite(verdict.error) else "?"
    return f"{ratio(verdict.change)[:-2]} ± {error} ×"


def ratio(value: float) -> str:
    """Three decimals for what is close to 1, fewer for large factors.

    >>> ratio(0.5412), ratio(78.608), ratio(136.145)
    ('0.541 ×', '78.6 ×', '136 ×')
    """
    if not math.isfinite(value):
        return "∞ ×"
    decimals = 3 if value < 10 else 1 if value < 100 else 0
    return f"{value:,.{decimals}f} ×"


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
    """
    if not math.isfinite(change):
        return f"more {what} than can be told"
    if change >= 2:
        return f"{change:.3g} times the {what}"
    share = abs(change - 1)
    if share < 0.005:
        return f"the same {what}"
    return f"{share:.0%} ".replace("%", " %") + ("less " if change < 1 else "more ") + what


GLOSSARY = {
    "σ²": "The variance of the exact gradient between minibatches, all parameters together.",
    "V": "The variance that sketches add to it, over their draws on the same minibatch.",
    "V injected": "The part of V that the draws of one layer cause, in its own gradient and in "
    "those of all layers below. The parts add up to V.",
    "local, propagated": "At a tensor that feeds sketched layers: the variance that is made by "
    "these layers, and what arrives from those above (Prop. 2.2).",
    "does it pay": "SGD needs steps in proportion to σ² + V. With ρ the cost of a step, a sketch "
    "pays if ρ(V)(σ² + V) ≤ ρ(0)σ². The optimizer's own time counts only if it was given as "
    "overhead; Adam and clipping are not linear in the gradient, for them this is a guide.",
    "FLOPs": "Counted on a real backward pass, with the scoring and drawing of the sketches.",
    "saved for backward": "Bytes that autograd keeps between forward and backward, each buffer "
    "once. Shared: what other operations keep alive anyway, so that no sketch can free it.",
    "break-even": "The kept fraction below which the sketched backward of a layer is faster.",
}
