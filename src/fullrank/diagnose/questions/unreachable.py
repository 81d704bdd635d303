"""Question 7: tokens it can never say.

A token is unreachable if no state whatsoever makes it the most probable one: its row lies inside the convex
hull of the others (`theory.argmax`). Sampling can still draw it; greedy decoding never will. A soft cap is
monotone and changes nothing. Every answer is proved: a state from which the token leads, or a certificate
that there is none; what time did not allow is counted as undecided.

The top-m capacity (Basri & Jacobs 2026) asks for more: of how many tokens can the head set the probabilities
at will? It is the largest m for which a witness was found for at least half of the random sets tried, so a
lower bound.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from fullrank.models.output_layer import OutputLayer
from fullrank.results.diagnosis import Unreachable, UnreachableToken
from fullrank.theory import top_m_capacity, unargmaxable


def unreachable(
    output: OutputLayer,
    name: Callable[[int], str],
    *,
    seconds: float | None = None,
    samples: int = 8,
    seed: int = 0,
    progress: Callable[[str, float], None] = lambda label, share: None,
) -> Unreachable:
    """From the output layer; `name` gives a token's text. Takes about `seconds`, if given."""
    started = time.monotonic()

    def report(stage: str, done: int, total: int) -> None:
        progress(stage, 0.8 * done / max(1, total))

    argmax_limit = None if seconds is None else 0.75 * seconds
    found = unargmaxable(output.weight, output.bias, time_limit=argmax_limit, progress=report)
    progress("capacity", 0.85)
    left = None if seconds is None else max(2.0, seconds - (time.monotonic() - started))
    capacity = top_m_capacity(output.weight, samples=samples, seed=seed, exact=False, time_limit=left)
    real = [one for one in found.certificates if one.token < output.tokens]
    return Unreachable(
        vocabulary=output.tokens,
        argmaxable=output.tokens - len(real) - sum(token < output.tokens for token in found.undecided),
        never=tuple(
            UnreachableToken(id=one.token, text=name(one.token), depth=one.depth)
            for one in sorted(real, key=lambda one: one.token)
        ),
        duplicates=sum(one.depth <= 0 for one in real),
        undecided=sum(token < output.tokens for token in found.undecided),
        padding_never=len(found.certificates) - len(real),
        capacity=capacity.capacity,
        capacity_interval=capacity.interval,
        capacity_samples=len(capacity.sizes),
        seconds=time.monotonic() - started,
    )
