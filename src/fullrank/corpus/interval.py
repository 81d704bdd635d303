"""How far a curve would move with other documents of the same kind: the jackknife over blocks of text.

The text is cut into g blocks of whole documents. The table is made g times, each time without one block, and
with θ_b the figure without block b,

    standard error² = (g - 1) / g  Σ (θ_b - mean θ)²        (Tukey 1958)

and the interval is Student's with g - 1 degrees.

A bootstrap would draw documents with replacement, and a document that is drawn twice adds no new context: its
tables hold the contexts of 63% of the text, and their dimensions lie below the one that they should surround.
The jackknife leaves out one block in g, and what its tables lack they all lack alike.

The interval is of chance in the documents, at this amount of text. That the dimension grows with more text is
another matter: see the same figure at several sizes.

All tables are measured with the same random probes, so that their errors are alike and cancel in differences.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import numpy as np
import scipy.special
from numpy.typing import NDArray

from fullrank.corpus.curve import SHARES, Effort, Spectrum
from fullrank.errors import FullrankError
from fullrank.results import Estimate

Floats = NDArray[np.float64]
LEVEL = 0.95
EFFORT = Effort(leading=32, probes=4, batches=1, steps=(64,), brackets=False, most_exact=1500)
"""Of the tables without a block: their differences matter, not their last digits."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Interval:
    """95% intervals over blocks of text."""

    blocks: int
    dimensions: dict[str, Estimate]
    beyond_first: dict[str, Estimate]
    relative_error_low: tuple[float, ...]
    """On the grid of the spectrum."""
    relative_error_high: tuple[float, ...]


def jackknife(
    whole: Spectrum, without: Callable[[int], Spectrum], blocks: int, *, progress: Callable[[float], None]
) -> Interval:
    """The intervals of a spectrum; `without(b)` is the spectrum without block b, on the same grid."""
    if blocks < 2:
        raise FullrankError(
            f"an interval needs at least two blocks of text, got {blocks}: pass more documents, or no "
            "interval"
        )
    parts = []
    for block in range(blocks):
        parts.append(without(block))
        progress((block + 1) / blocks)
    return from_parts(whole, parts)


def from_parts(whole: Spectrum, parts: Sequence[Spectrum]) -> Interval:
    """The intervals from the spectra that lack one block each."""

    def dimensions(kind: str) -> dict[str, Estimate]:
        found = {}
        for name in SHARES:
            values = np.array([getattr(part, kind)[name].real for part in parts])
            one = getattr(whole, kind)[name]
            reach = _reach(values[:, None])[0]
            # The spectrum's own limits are no chance of documents, but a reader wants all that is uncertain.
            reach = math.hypot(reach, (one.high - one.low) / 2)
            found[name] = Estimate(
                value=float(one.value),
                low=max(one.value - reach, 0.0),
                high=min(one.value + reach, float(whole.vocabulary)),
            )
        return found

    centre = np.array(whole.relative_error)
    reach = _reach(np.array([part.relative_error for part in parts]))
    low = np.minimum(np.maximum(centre - reach, 0.0), whole.relative_error_low)
    high = np.maximum(np.minimum(centre + reach, 1.0), whole.relative_error_high)
    return Interval(
        blocks=len(parts),
        dimensions=dimensions("dimensions"),
        beyond_first=dimensions("beyond_first"),
        relative_error_low=tuple(low.tolist()),
        relative_error_high=tuple(high.tolist()),
    )


def _reach(values: Floats) -> Floats:
    """Half the interval of figures [g, k] that lack one block each."""
    count = len(values)
    error = np.sqrt((count - 1) / count * np.square(values - values.mean(axis=0)).sum(axis=0))
    result: Floats = error * float(scipy.special.stdtrit(count - 1, 0.5 + LEVEL / 2))
    return result
