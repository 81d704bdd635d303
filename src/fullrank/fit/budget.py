"""How long a run may be: tokens, floating-point operations or seconds of training.

Heads are compared at equal compute: `flops=1e17` gives each the steps that its own cost allows. Seconds are
turned into steps once the pace is known, after the first steps, and the number is kept: a run that is killed
and continued has the schedule of one that was not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from fullrank.errors import FullrankError

Measure = Literal["tokens", "flops", "seconds"]
MOST = {"tokens": 1e16, "flops": 1e30, "seconds": 1e10}
PACED = 32
"""Steps after which the pace of a run with a budget of seconds is known."""
WARMING = 8
"""Of which the first do not count: they compile and warm up."""
UNKNOWN = 1_000_000
"""Steps that a schedule is told of while nobody knows: the warm-up stays near its beginning."""


@dataclass(frozen=True)
class Budget:
    measure: Measure
    amount: float

    @classmethod
    def parse(cls, text: str) -> Budget | None:
        """`tokens=2e9`, `flops=1e17` or `seconds=600`; None for no text."""
        if not text:
            return None
        measure, _, amount = text.partition("=")
        try:
            number = float(amount)
        except ValueError:
            number = 0.0
        if measure not in get_args(Measure) or not 0 < number <= MOST[measure]:
            raise FullrankError(
                f"budget={text!r} is none: expected tokens=, flops= or seconds= and a number above 0, such "
                "as tokens=2e9, that a run can live to see"
            )
        return cls(measure, number)  # type: ignore[arg-type]

    def steps(self, *, tokens: int, flops: int, seconds: float | None = None) -> int | None:
        """Whole steps within the budget, at least one, for steps of so many tokens that cost `flops` each and
        take so many seconds; None where those are not known yet."""
        if self.measure == "tokens":
            return max(1, int(self.amount // tokens))
        if self.measure == "flops":
            return max(1, int(self.amount // (tokens * flops)))
        return None if seconds is None else max(1, int(self.amount / seconds))
