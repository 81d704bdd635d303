"""An axis of numbers: what it can hold, where it begins and ends, and its labels."""

from __future__ import annotations

import dataclasses
import math
import textwrap
from typing import Any

# Beyond this a pixel of a chart loses its meaning, and sums of squares of floats overflow.
LARGEST_DRAWN, SMALLEST_POSITIVE = 1e15, 1e-30
FEWEST_TICKS = 3
"""That tell where on a log axis a point lies."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Axis:
    title: str
    log: bool = False
    powers_of_two: bool = False
    low: float | None = None
    """Where the axis begins; None to fit what is drawn."""
    high: float | None = None

    def holds(self, value: float) -> bool:
        if self.log:
            return SMALLEST_POSITIVE <= value <= LARGEST_DRAWN
        return math.isfinite(value) and abs(value) <= LARGEST_DRAWN

    def contains(self, value: float) -> bool:
        """Whether a value lies between the ends."""
        return (self.low is None or self.low <= value) and (self.high is None or value <= self.high)

    def fitted(self, values: list[float]) -> Axis:
        """The axis with both ends, around the values and a little air."""
        low = min(values) if self.low is None else self.low
        high = max(values) if self.high is None else self.high
        if self.log:
            air = max((high / low) ** 0.05, 1.05)
            edges = (low / air, high * air)
        else:
            air = 0.05 * (high - low) or max(abs(high) * 0.05, 0.05)
            edges = (low - air, high + air)
        return dataclasses.replace(
            self,
            low=edges[0] if self.low is None else self.low,
            high=edges[1] if self.high is None else self.high,
        )

    def ticks(self, most: int) -> list[float] | None:
        """Tick values of a log axis with at most about so many labels; None to leave a linear one alone."""
        if not self.log or self.low is None or self.high is None:
            return None
        base = 2 if self.powers_of_two else 10
        first, last = math.ceil(math.log(self.low, base) - 1e-9), math.floor(math.log(self.high, base) + 1e-9)
        step = max(1, math.ceil((last - first + 1) / most))
        powers = [float(base) ** exponent for exponent in range(first, last + 1, step)]
        if len(powers) >= (2 if self.powers_of_two else FEWEST_TICKS):
            return powers
        finer = [part * 10.0**exponent for exponent in range(first - 1, last + 1) for part in (1, 2, 5)]
        within = [tick for tick in finer if self.low <= tick <= self.high]
        return within if len(within) >= FEWEST_TICKS else self._even(most)

    def _even(self, most: int) -> list[float]:
        """Round values of one distance, for ends that lie within a small factor of each other."""
        assert self.low is not None
        assert self.high is not None
        least = (self.high - self.low) / (most + 1)
        size = 10.0 ** math.floor(math.log10(least))
        # At most twice the least: of five labels at most, three are sure.
        step = next(part * size for part in (2, 2.5, 5, 10) if part * size > least)
        first, last = math.ceil(self.low / step), math.floor(self.high / step)
        # Not place * step: three times 0.1 is no round number.
        return [float(f"{place * step:.12g}") for place in range(first, last + 1)]

    def lines(self, wide: bool) -> list[str]:
        """The title, on as many lines as a narrow picture needs."""
        return [self.title] if wide else textwrap.wrap(self.title, 34)

    def encoding(self, *, ticks: int) -> dict[str, Any]:
        """Scale and labels as Vega-Lite has them, with about so many ticks."""
        scale: dict[str, Any] = {"type": "linear", "zero": False}
        if self.log:
            scale = {"type": "log", "base": 2 if self.powers_of_two else 10}
        labels: dict[str, Any] = {"title": self.title, "labelFlush": False, "tickCount": ticks}
        values = self.ticks(ticks)
        if values is not None:
            labels["values"] = values
            labels["labelExpr"] = (
                "datum.value >= 1000 && datum.value < 1e6 ? format(datum.value, ',') : "
                "datum.value < 0.001 || datum.value >= 1e6 ? format(datum.value, '.0e') : "
                "format(datum.value, '~g')"
            )
        return {"scale": {**scale, "domain": [self.low, self.high], "nice": False}, "axis": labels}
