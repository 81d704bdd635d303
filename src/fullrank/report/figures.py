"""Figures as text: how many digits, thousands apart, and an interval in the digits that it deserves."""

from __future__ import annotations

import math

from fullrank.results import Estimate

Cell = str | int | float | Estimate | None
"""What a table can hold; None where there is no figure."""

NONE = "–"


def number(value: float) -> str:
    """A figure in four significant digits."""
    return f"{value:.4g}"


def figure(value: Cell) -> str:
    """A cell as text: four significant digits, thousands apart; an estimate without its interval."""
    if value is None:
        return NONE
    if isinstance(value, Estimate):
        return fixed(value.value, decimals(value))
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, str):
        return value
    return fixed(value, 0) if 1e4 <= abs(value) < 1e9 else minus(number(value))


def interval(estimate: Estimate) -> str:
    """The interval in words, or "" where it has none."""
    if math.isnan(estimate.low) or math.isnan(estimate.high):
        return ""
    if math.isinf(estimate.low) and math.isinf(estimate.high):
        return ""
    places = decimals(estimate)
    if estimate.high == math.inf:
        return f"{fixed(estimate.low, places)} or more"
    return f"{fixed(estimate.low, places)} to {fixed(estimate.high, places)}"


def with_interval(estimate: Estimate) -> str:
    """Value and interval, as in "0.012 (0.004 to 0.021)"."""
    between = interval(estimate)
    return f"{figure(estimate)} ({between})" if between else figure(estimate)


def whole(value: float) -> str:
    """A count or a rank that was interpolated, without its decimals."""
    return fixed(value, 0)


def whole_interval(estimate: Estimate) -> str:
    """The interval of a rank in words, or "" where it has none."""
    if not math.isfinite(estimate.low + estimate.high):
        return ""
    return f"{whole(estimate.low)} to {whole(estimate.high)}"


def decimals(estimate: Estimate) -> int:
    """So many places that the interval's width has two digits: more would be noise."""
    between = estimate.high - estimate.low
    if not math.isfinite(between) or between <= 0:
        return 3
    places = min(max(1 - math.floor(math.log10(between)), 0), 6)
    # An end that is not 0 must not read as 0: whether an interval includes it is what readers look for.
    ends = [end for end in (estimate.low, estimate.high) if round(end, 6) != 0]
    while any(round(end, places) == 0 for end in ends):
        places += 1
    return places


def fixed(value: float, places: int) -> str:
    """A figure with so many decimal places, in powers of ten where it would be too long."""
    if not math.isfinite(value) or abs(value) >= 1e9:
        return minus(number(value))
    text = f"{value:,.{places}f}"
    return minus(text.lstrip("-") if float(text.replace(",", "")) == 0 else text)


def percent(share: float, places: int = 1) -> str:
    """A share as a percentage; what rounds to 0 or to 100 without being it gets more places."""
    while (
        math.isfinite(share) and places < 4 and round(100 * share, places) in (0, 100) and share not in (0, 1)
    ):
        places += 1
    return f"{fixed(100 * share, places)}%"


def perplexity_share(gain: float) -> float:
    """1 - exp(-gain): the share of the perplexity that a gain in nats per token takes away."""
    # Under -700 the exponential of a float overflows.
    return -math.expm1(-gain) if gain > -700 else -math.inf


def minus(text: str) -> str:
    """The text with the minus sign that is as wide as a plus, but not in a power of ten."""
    return "−" + text[1:] if text.startswith("-") else text
