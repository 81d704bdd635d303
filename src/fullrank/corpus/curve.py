"""What a table's spectrum is told as: leading values, relative error against dimension, dimensions needed.

    relative error(d) = sqrt(Σ_{i > d} σ_i²) / |T|     the least that a table of rank d leaves (Eckart-Young)

`dimensions` holds, for 50, 90 and 99%, the smallest d whose relative error is at most 50, 10 and 1%.
`beyond_first` holds the same for the error relative to what is left after one dimension: in the log table the
first one is the unigram distribution, which a bias of the output layer can hold, and it makes most of the
norm.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fullrank.corpus.gram import Gram
from fullrank.corpus.table import Table

Floats = NDArray[np.float64]
Progress = Callable[[str, float], None]

SHARES: Mapping[str, float] = {"50": 0.5, "90": 0.1, "99": 0.01}
"""Relative error that is left, by what is explained."""
LEADING = 256
MOST_EXACT = 12_000
"""Joined columns; larger matrices take LAPACK longer than the quadrature by far."""
PROBES, BATCHES = 8, 4
STEPS = (64, 96, 144, 216, 324)
ROUNDING = 1e-9
"""A relative error that equals its bound up to rounding has reached it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Effort:
    """How much work the approximate path may do."""

    leading: int = LEADING
    probes: int = PROBES
    """A batch."""
    batches: int = BATCHES
    """At most; more are drawn while limits are wide."""
    steps: tuple[int, ...] = STEPS
    """Lanczos steps of a probe, at most the last; more are taken while brackets are wide."""
    brackets: bool = True
    """Whether limits are wanted: without them the first number of steps is taken, and no bracket."""
    most_exact: int = MOST_EXACT


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dimension:
    """A number of dimensions; low and high are its limits, equal to it where it is exact."""

    value: int
    low: int
    high: int
    real: float
    """Before rounding up: where the error, drawn as a line between whole dimensions, meets its bound."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spectrum:
    """What a table's singular values say."""

    construction: str
    contexts: int
    vocabulary: int
    method: str
    """exact or lanczos."""
    joined: int
    """Columns whose eigenvalues had to be computed; the others were read off the diagonal."""
    norm: float
    """Frobenius norm of the table."""
    singular_values: tuple[float, ...]
    """The leading ones, falling."""
    singular_value_error: float
    """Largest bound of their errors, absolute."""
    grid: tuple[int, ...]
    relative_error: tuple[float, ...]
    relative_error_low: tuple[float, ...]
    relative_error_high: tuple[float, ...]
    dimensions: dict[str, Dimension]
    beyond_first: dict[str, Dimension]
    probes: int = 0
    steps: int = 0
    products: int = 0
    """Vectors that the Gram matrix was applied to."""
    seconds: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Task:
    """A table whose spectrum is wanted, and what it may cost."""

    table: Table
    gram: Gram
    memory_bytes: int | None
    progress: Progress
    seed: int
    effort: Effort
    grid: tuple[int, ...]

    @property
    def held(self) -> int:
        """Bytes of the table and of its Gram matrix: a number and its place an entry."""
        return 12 * self.table.entries + 16 * self.gram.entries + 64 * self.table.vocabulary

    def answer(self, **figures: Any) -> Spectrum:
        """The figures with what is known of the table."""
        return Spectrum(
            construction=self.table.construction,
            contexts=self.table.contexts,
            vocabulary=self.table.vocabulary,
            joined=self.gram.size,
            grid=self.grid,
            **figures,
        )
