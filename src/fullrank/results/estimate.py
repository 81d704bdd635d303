"""A figure with its interval, as every record has them."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Estimate:
    """A figure and its 95% interval."""

    value: float
    low: float
    high: float
