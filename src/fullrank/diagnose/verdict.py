"""The answer first: does the output layer hold this model back, by how much, and what to do next.

    held back       the best head's gain over the best control is surely above zero, and worth a word
    not held back   it is not, and a gain that matters would have been seen
    undecided       neither: the fits could not have seen a gain that matters, or did not come to their end

What matters is `MATERIAL` nats per token. The lines are the same in the terminal and on the page.

By how much: fits to finite text find less than is there. A head pays for every parameter that it learns from
noise, about the same whatever it gains, and so does the planted gain's, in the same states with as many
tokens; what was missed of that is added to what was found (a bootstrap's correction of bias), once for the
figure and twice for the upper end of its interval. The lower end is what was found. Where the fits did not
come to their end, or missed most of what was planted, there is no upper end; nor where learning W from this
text costs more than the gain, (rows D) / 2N nats for N tokens: what is planted moves rows over W as it is,
and says nothing of what another W would bring. Where far more was missed than was found, because far more
had to be planted, nothing is added: the figure is what was found, and has no upper end.

All of it is about heads of the kind that was fitted. A truth that no mixture over these states has, as where
components bend with the state, is worth more to a head that could follow it (docs/diagnose.md).

A wide model's rows are split along its leading directions alone, and so is what is planted. Of a gain that is
spread over all of them only a part lies there, and a split gains with the square of that part (the fourth
power of its length). What is said to be seen is a gain of that kind.
"""

from __future__ import annotations

import dataclasses
import math

from fullrank.diagnose.settings import THOROUGH
from fullrank.fit.comparison import ORIGINAL
from fullrank.fit.power import COVERED, DETECTED
from fullrank.results.diagnosis import BetterHead, Diagnosis, Estimate, Verdict

MATERIAL = 0.02
"""Nats per token, 2% of perplexity: what one would change an output layer for."""
LEAST = 0.001
"""Nats per token below which a gain is not worth a word, however sure."""
GUESSED = 2.0
"""Times what was found above which what was missed corrects nothing."""
MOST = 1.0
"""Nats per token: more than any head gains."""

HELD_BACK, NOT_HELD_BACK, UNDECIDED = "held back", "not held back", "undecided"


def verdict(record: Diagnosis) -> Verdict:
    found = record.better_head
    if found is None or not found.best or not math.isfinite(found.best_gain.value):
        reason = next((one.reason for one in record.missing if one.question == "better_head"), "not measured")
        return Verdict(
            outcome=UNDECIDED, gain=None, smallest=math.inf,
            lines=(
                "Undecided: what a better head would buy was not measured.",
                f"The reason: {reason}.",
                "Next: ask for better_head, where this model and this text allow it.",
            ),
            next="",
        )  # fmt: skip
    smallest = smallest_seen(found)
    gain = there(found, smallest, record.model.width)
    outcome = outcome_of(found, smallest, gain)
    command = _next(record, found, outcome)
    return Verdict(
        outcome=outcome,
        gain=gain,
        smallest=smallest,
        lines=(
            _first(record, found, gain, outcome),
            _second(found, gain, smallest),
            _third(record, found, outcome, command),
        ),
        next=command,
    )


def smallest_seen(found: BetterHead) -> float:
    """The smallest gain that would have been told from zero, if it is spread over all directions; by the
    planted one where there was one, else by the spread over blocks of text alone, which does not know whether
    the fits would have found it."""
    gain = found.best_gain
    if found.power is not None:
        seen = found.power.smallest / found.power.covered**2
        # One that is surely there was seen, whatever became of a planted one.
        seen = min(seen, gain.value) if _seen(gain) and math.isfinite(found.power.smallest) else seen
        return seen if seen < MOST else math.inf
    seen = DETECTED * (gain.high - gain.low) / (2 * 1.96)
    # A head that stayed where it began has no spread, and says nothing.
    return seen if _converged(found) and seen >= LEAST else math.inf


def there(found: BetterHead, smallest: float, width: int) -> Estimate:
    """Nats per token that a better head would gain: found, and missed."""
    gain, tried = found.best_gain, found.power
    if not _seen(gain):
        return dataclasses.replace(gain, high=max(gain.high, smallest))
    if tried is None or not math.isfinite(tried.smallest) or not _converged(found):
        return dataclasses.replace(gain, high=math.inf)
    missed = max(0.0, tried.planted.value - tried.found.value)
    if missed > GUESSED * gain.value or tried.covered < COVERED:
        return dataclasses.replace(gain, high=math.inf)
    high = gain.high + 2 * missed
    if found.trained_rows * width > 2 * found.fit_tokens * (gain.value + missed):
        high = math.inf
    return Estimate(value=gain.value + missed, low=gain.low, high=high)


def _seen(gain: Estimate) -> bool:
    return gain.low > 0 and gain.value >= LEAST


def outcome_of(found: BetterHead, smallest: float, known: Estimate) -> str:
    """`known` is what is there."""
    gain = found.best_gain
    if _seen(gain):
        # Where nobody knows how much more there is, or fits miss most of a planted gain, there is one, and
        # not whether it matters.
        told = math.isfinite(smallest if found.power is None else found.power.smallest + known.high)
        return HELD_BACK if told or gain.value >= MATERIAL else UNDECIDED
    # Nothing found is an answer only where it was tried what would have been found.
    tried = found.power is not None and smallest <= MATERIAL
    return NOT_HELD_BACK if tried and gain.value < MATERIAL else UNDECIDED


def _converged(found: BetterHead) -> bool:
    return all(fit.converged for fit in found.fits if fit.head in ("softmax", found.best))


def _first(record: Diagnosis, found: BetterHead, gain: Estimate, outcome: str) -> str:
    name = record.model.name
    if outcome == HELD_BACK:
        closed = math.isfinite(gain.high)
        share = f"about {_share(gain.value)}" if closed else f"at least {_share(gain.low)}"
        return (
            f"Held back: another output layer would take {share} off the perplexity of {name} on such text."
        )
    if outcome == NOT_HELD_BACK:
        return f"Not held back: no better head was found for {name} on this text."
    if _seen(found.best_gain):
        return f"Undecided: a better head gains {name} a little, and this run cannot say how much is there."
    return f"Undecided: this run cannot say whether the output layer holds {name} back."


def _second(found: BetterHead, gain: Estimate, smallest: float) -> str:
    measured, tried = found.best_gain, found.power
    fit = next(one for one in found.fits if one.head == found.best)
    kind = f"{found.best} with {fit.components} components" if fit.components > 1 else found.best
    sure = f"{kind} gains" if measured.low > 0 else f"The best head tried, {kind}, comes to"
    words = f"{sure} {_nats(measured)} nats per token over {_control(found.control)}"
    if found.stayed:
        words = (
            f"The best head tried, {kind}, is still {_control(found.control)}: no step of training on "
            f"{found.fit_tokens:,} tokens made it better on others"
        )
    refit = found.refit_gain
    if found.control == ORIGINAL and refit is not None and refit.high < 0:
        words += f", of which {refit.value:+.4f} is what any refit to {found.fit_tokens:,} tokens loses"
    seen = f"; a gain of {smallest:.4f} would have been seen" if math.isfinite(smallest) else ""
    planted = ""
    if tried is not None:
        along = "" if tried.covered >= COVERED else " along its leading directions"
        planted = f"of a planted {tried.planted.value:.3f}{along} the same fits find {tried.found.value:.3f}"
    if tried is not None and not math.isfinite(tried.smallest):
        rest = f"{planted}: too little to say what is there"
    elif not _converged(found):
        rest = "its fits did not come to their end, so there may be more"
    elif tried is None and math.isfinite(smallest):
        rest = f"a gain of {smallest:.4f} or more would have been seen if the fits can find it (not tested)"
    elif tried is None:
        rest = "it stayed about where it began, and what would have been seen was not tested"
    elif _seen(measured) and gain.value == measured.value and not math.isfinite(gain.high):
        rest = f"{planted}, and it is not known how much more is there"
    elif _seen(measured) and not math.isfinite(gain.high):
        rest = (
            f"{planted}, so that {_nats(gain)} is there for a head of this kind, which is little beside what "
            f"W costs to learn from {found.fit_tokens:,} tokens{seen}"
        )
    elif _seen(measured):
        rest = f"{planted}, so that {_nats(gain)} is there for a head of this kind{seen}"
    elif math.isfinite(smallest):
        rest = f"a gain of {smallest:.4f} or more would have been seen ({planted})"
    else:
        rest = f"{planted}; one spread over all of them would not have been seen"
    return f"{words}; {rest}."


def _control(name: str) -> str:
    return {
        ORIGINAL: "the output layer as it is",
        "softmax": "the same softmax refitted to this text",
        "softmax_equal": "a softmax of equal parameters",
    }.get(name, "the better control")


def _third(record: Diagnosis, found: BetterHead, outcome: str, command: str) -> str:
    if outcome != NOT_HELD_BACK:
        return f"Next: {command}."
    rank = record.rank_needed
    if rank is not None and rank.bound == "at least":
        return (
            "Next: nothing in the head; every direction of the width is used, so more width may help where a "
            "better head does not."
        )
    if found.refit_gain is not None and found.refit_gain.low > MATERIAL:
        return (
            f"Next: nothing in the head; fitting the model to this text would gain {_nats(found.refit_gain)} "
            "nats per token, so fine-tune it."
        )
    return "Next: nothing here; look for gains elsewhere than in the output layer."


def _next(record: Diagnosis, found: BetterHead, outcome: str) -> str:
    model = f" {record.model.given}" if record.model.given else ""
    # Sources are names without their folders.
    bundled = any("documentation and docstrings" in source for source in record.text.sources)
    text = "--train-default" if bundled else "--train TEXT"
    if outcome == HELD_BACK:
        fit = next(one for one in found.fits if one.head == found.best)
        components = f" --components {fit.components}" if fit.components > 1 else ""
        return f"fullrank upgrade{model} --head {found.best}{components} {text}"
    if outcome == UNDECIDED:
        more = 4 * record.text.tokens
        if found.power is None:
            return f"fullrank diagnose{model} without --quick"
        thorough = "" if more > THOROUGH.most_tokens else ", or --thorough on a GPU"
        return f"fullrank diagnose{model} --tokens {more} with as much text{thorough}"
    return ""


def _share(gain: float) -> str:
    """Of perplexity."""
    return f"{1 - math.exp(-gain):.1%}"


def _nats(estimate: Estimate) -> str:
    # z: what rounds to zero has no sign of its own.
    low = f"{estimate.low:+z.4f}"
    if not math.isfinite(estimate.high):
        return f"{estimate.value:+z.4f} (95%: {low} or more)"
    return f"{estimate.value:+z.4f} (95%: {low} to {estimate.high:+z.4f})"
