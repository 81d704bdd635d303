"""Alarms of a run, from its evaluations alone: components die, the head collapses, the curve turns.

    dead_components   more components are dead than before, from the second evaluation on: a mixture may start
                      with some, and what is dead twice, or was alive, is worth a word. One alarm a change.
    collapsed_head    the effective rank of W falls below half of its highest, or below a tenth of D; or the
                      log-probabilities of a mixture fall back to the rank of one softmax. Once until it has
                      recovered, which takes a little more than not being collapsed.
    curve_turned      the validation loss lies above its best by more than 2% and by more than 3 standard
                      errors of the difference, for two evaluations in a row. Once for every best.

The state is a function of the evaluations seen, so a resumed run that hands over its old ones gives the same
alarms as one that was never stopped. A value that is missing or no number raises nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

HALF, TENTH = 0.5, 0.1
"""Of the highest effective rank, and of D: below is collapsed."""
RECOVERED = 1.2
"""A collapse is over above this multiple of the bound that it fell below."""
SOFTMAX_RANK, BEYOND_SOFTMAX = 1.02, 1.1
"""Multiples of D: up to the first a rank is that of one softmax with its bias, above the second it is not."""
TURNED_SHARE, TURNED_ERRORS, TURNED_EVALUATIONS = 0.02, 3.0, 2


@dataclass(frozen=True, kw_only=True)
class Alarm:
    """Something that a person should look at."""

    step: int
    kind: str
    """dead_components, collapsed_head or curve_turned."""
    message: str
    """One sentence with the numbers, and what to look at."""


class Alarms:
    """Call `check` with every evaluation of a run in order; `history` are those before a resume."""

    def __init__(self, history: Iterable[Mapping[str, Any]] = ()) -> None:
        self._evaluations = 0
        self._dead = 0
        self._highest_share = 0.0
        self._collapsed = False
        self._highest_rank = 0.0
        self._fallen = False
        self._best: tuple[float, float, int] | None = None
        self._above = 0
        self._told = False
        for evaluation in history:
            self.check(int(evaluation["step"]), evaluation)

    def check(self, step: int, evaluation: Mapping[str, Any]) -> list[Alarm]:
        """The alarms of an evaluation, as a line of log.jsonl has it; the test split raises none."""
        if evaluation.get("split", "valid") != "valid":
            return []
        monitors = evaluation.get("monitors") or {}
        found = [
            ("dead_components", self._died(monitors)),
            ("collapsed_head", self._flattened(monitors)),
            ("collapsed_head", self._fell(monitors)),
            ("curve_turned", self._turned(step, evaluation)),
        ]
        self._evaluations += 1
        return [Alarm(step=step, kind=kind, message=message) for kind, message in found if message]

    def _died(self, monitors: Mapping[str, Any]) -> str:
        count = _number(monitors.get("dead_components"))
        if math.isnan(count) or self._evaluations == 0:
            return ""
        before, self._dead = self._dead, int(count)
        if count <= before:
            return ""
        shares = list(monitors.get("component_shares") or ())
        least = sorted(range(len(shares)), key=lambda k: shares[k])[: self._dead]
        which = f" (number {', '.join(str(k) for k in sorted(least))}, counted from 0)" if least else ""
        return (
            f"{int(count)} of {len(shares) or 'the'} components{which} {'is' if count == 1 else 'are'} dead, "
            f"{before} before: look at component_shares and prior_entropy, and try a smaller "
            "optimiser.lr_head, head.balance above 0 or fewer components"
        )

    def _flattened(self, monitors: Mapping[str, Any]) -> str:
        share = _number(monitors.get("head_effective_rank_share"))
        if math.isnan(share):
            return ""
        self._highest_share = max(self._highest_share, share)
        bound = max(HALF * self._highest_share, TENTH)
        if self._collapsed:
            self._collapsed = share < RECOVERED * bound
            return ""
        self._collapsed = share < bound
        if not self._collapsed:
            return ""
        return (
            f"the effective rank of the head's matrix is {share:.1%} of its width, down from at most "
            f"{self._highest_share:.1%}: look at head_singular_entropy and anisotropy, and try a smaller "
            "optimiser.lr or more weight decay"
        )

    def _fell(self, monitors: Mapping[str, Any]) -> str:
        rank, ceiling = _number(monitors.get("logprob_rank")), _number(monitors.get("logprob_rank_ceiling"))
        share = _number(monitors.get("head_effective_rank_share"))
        D = _number(monitors.get("head_effective_rank")) / share if share > 0 else math.nan
        mixture = len(monitors.get("component_shares") or ()) > 1
        if not mixture or not ceiling > BEYOND_SOFTMAX * D or math.isnan(rank):
            return ""
        self._highest_rank = max(self._highest_rank, rank)
        if self._fallen:
            self._fallen = rank <= BEYOND_SOFTMAX * D
            return ""
        # A mixture may start as one softmax; falling back to it is another matter.
        self._fallen = self._highest_rank > BEYOND_SOFTMAX * D and rank <= SOFTMAX_RANK * D + 1
        if not self._fallen:
            return ""
        return (
            f"the log-probabilities have rank {rank:.0f} of {ceiling:.0f} that the sample could show, down "
            f"from {self._highest_rank:.0f}: no more than one softmax of width {D:.0f} has; look at "
            "component_divergence, dead_components and prior_entropy"
        )

    def _turned(self, step: int, evaluation: Mapping[str, Any]) -> str:
        loss, error = _number(evaluation.get("loss")), _number(evaluation.get("standard_error"))
        error = 0.0 if math.isnan(error) else error
        if math.isnan(loss):
            return ""
        if self._best is None or loss < self._best[0]:
            self._best, self._above, self._told = (loss, error, step), 0, False
            return ""
        best, best_error, best_step = self._best
        rise = loss - best
        # Both are over the same text, so their difference is surer than this says.
        errors = math.hypot(error, best_error)
        above = rise > TURNED_SHARE * abs(best) and rise > TURNED_ERRORS * errors
        self._above = self._above + 1 if above else 0
        if self._told or self._above < TURNED_EVALUATIONS:
            return ""
        self._told = True
        return (
            f"the validation loss is {loss:.4f} nats per token, {rise / best:.1%} above its best of "
            f"{best:.4f} at step {best_step} (standard error {error:.4f}): compare with the training loss, "
            "and stop there or try more dropout"
        )


def _number(value: Any) -> float:
    """A finite float, or nan for what is none."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        return math.nan
    return number if math.isfinite(number) else math.nan
