"""The answer first: does the output layer hold this model back, by how much, and what to do next.

    held back       the best head's gain over the best control is surely above zero, and worth a word
    not held back   it is not, and a gain that matters would have been seen
    undecided       neither: the fits could not have seen a gain that matters, or did not come to their end

What matters is `MATERIAL` nats per token. The lines are the same in the terminal and on the page.
"""

from __future__ import annotations

import math

from fullrank.fit.power import DETECTED
from fullrank.results.diagnosis import BetterHead, Diagnosis, Estimate, Verdict

MATERIAL = 0.02
"""Nats per token, 2% of perplexity: what one would change an output layer for."""
LEAST = 0.001
"""Nats per token below which a gain is not worth a word, however sure."""

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
    outcome = outcome_of(found, smallest)
    command = _next(record, found, outcome)
    return Verdict(
        outcome=outcome,
        gain=found.best_gain,
        smallest=smallest,
        lines=(
            _first(record, found, outcome),
            _second(found, smallest),
            _third(record, found, outcome, command),
        ),
        next=command,
    )


def smallest_seen(found: BetterHead) -> float:
    """The smallest gain that would have been told from zero; by the planted one where there was one, else by
    the spread over blocks of text alone, which does not know whether the fits would have found it."""
    if found.power is not None:
        return found.power.smallest
    gain = found.best_gain
    error = (gain.high - gain.low) / (2 * 1.96)
    return DETECTED * error if _converged(found) else math.inf


def outcome_of(found: BetterHead, smallest: float) -> str:
    gain = found.best_gain
    if gain.low > 0 and gain.value >= LEAST:
        # Fits that miss most of a planted gain say that there is one, and not how large it is.
        return HELD_BACK if math.isfinite(smallest) or gain.value >= MATERIAL else UNDECIDED
    # Nothing found is an answer only where it was tried what would have been found.
    tried = found.power is not None and smallest <= MATERIAL
    return NOT_HELD_BACK if tried and gain.value < MATERIAL else UNDECIDED


def _converged(found: BetterHead) -> bool:
    return all(fit.converged for fit in found.fits if fit.head in ("softmax", found.best))


def _first(record: Diagnosis, found: BetterHead, outcome: str) -> str:
    name = record.model.name
    if outcome == HELD_BACK:
        share = 1 - math.exp(-found.best_gain.value)
        return f"Held back: the output layer of {name} costs it {share:.1%} of perplexity on this text."
    if outcome == NOT_HELD_BACK:
        return f"Not held back: no better head was found for {name} on this text."
    return f"Undecided: this run cannot say whether the output layer holds {name} back."


def _second(found: BetterHead, smallest: float) -> str:
    gain = found.best_gain
    fit = next(one for one in found.fits if one.head == found.best)
    kind = f"{found.best} with {fit.components} components" if fit.components > 1 else found.best
    sure = f"{kind} gains" if gain.low > 0 else f"The best head tried, {kind}, comes to"
    words = f"{sure} {_nats(gain)} nats per token over {_control(found.control)}"
    if math.isfinite(smallest):
        seen = f"a gain of {smallest:.4f} or more would have been seen"
        if found.power is None:
            seen += " if the fits can find it (not tested)"
    elif found.power is not None:
        seen = f"a planted gain of {found.power.planted.value:.3f} was not found"
    elif math.isfinite(gain.high):
        seen = "its fits did not come to their end"
    else:
        seen = "there is too little text to say what would have been seen"
    return f"{words}; {seen}."


def _control(name: str) -> str:
    return {
        "original": "the output layer as it is",
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
        return f"fullrank diagnose{model} --tokens {more} with as much text, or --thorough on a GPU"
    return ""


def _nats(estimate: Estimate) -> str:
    return f"{estimate.value:+.4f} (95%: {estimate.low:+.4f} to {estimate.high:+.4f})"
