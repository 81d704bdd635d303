"""How long a run may be: tokens, floating-point operations or seconds of training.

Heads are compared at equal compute: `flops=1e17` gives each the steps that its own cost allows. Seconds are
kept whatever else the machine comes to do: at every look at the watch the last step is found anew by the pace
since the last one, and the learning rate follows the share of the seconds that is gone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from fullrank.errors import FullrankError

Measure = Literal["tokens", "flops", "seconds"]
MOST = {"tokens": 1e16, "flops": 1e30, "seconds": 1e10}
WARMING, PACED = 8, 24
"""First steps of a run with a budget of seconds, which compile and warm up, and those after them that its
first pace is taken from."""
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

    def steps(self, *, tokens: int, flops: int) -> int | None:
        """Whole steps within the budget, at least one, for steps of so many tokens that cost `flops` each;
        None for seconds, which `Watch` is for."""
        if self.measure == "seconds":
            return None
        return max(1, int(self.amount // (tokens * (flops if self.measure == "flops" else 1))))


@dataclass(frozen=True)
class Watch:
    """The last look at a run with a budget of seconds."""

    step: int = 0
    seconds: float = 0.0
    """Of training, gone by then."""
    pace: float = 0.0
    """Seconds a step since the look before; 0 while nobody knows."""

    def due(self, step: int) -> bool:
        """Whether a run whose pace is not known wants a look after this step."""
        return not self.pace and step - self.step == (PACED if self.seconds else WARMING)

    def looked(self, step: int, seconds: float) -> Watch:
        if step == self.step:
            return self
        if not self.seconds:
            return Watch(step, seconds)
        return Watch(step, seconds, max(1e-9, (seconds - self.seconds) / (step - self.step)))

    def end(self, amount: float) -> int:
        """The last step of a run of so many seconds, if it keeps its pace."""
        return self.step + max(0, int((amount - self.seconds) / self.pace))

    def share(self, step: int, amount: float) -> float:
        """Of the seconds, gone after a step."""
        return min(1.0, (self.seconds + (step - self.step) * self.pace) / amount)
