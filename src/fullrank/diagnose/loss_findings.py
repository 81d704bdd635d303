"""Is the loss one that a trained model has on its text? If not, all other answers are about something else.

    early positions    tokens 2 to 15 of a window lose more than half of what lies between the last positions
                       and a uniform guess, log V. A trained model loses some nats more there than later:
                       SmolLM2-135M 5.1 where its last positions lose 2.4, a third of the way. More is what
                       a missing begin token does (Gemma 3 without its own: 9 to 13 nats, a guess 12.5).
    near uniform       the mean loss is above 0.8 log V: untrained, damaged, or in another language.

Both are told by the low end of the 95% interval.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from fullrank.results.diagnosis import Diagnosis, Finding

EARLY = (2, 15)
"""Positions; the first two have seen next to nothing."""
LEAST_WINDOW = 32
EARLY_SHARE = 0.5
LEAST_EXCESS = 1.0
"""Nats: an untrained model is near log V everywhere, and half of nothing is soon exceeded."""
UNIFORM_SHARE = 0.8


def findings(record: Diagnosis) -> Iterator[Finding]:
    if record.loss is None or record.model.vocabulary < 2:
        return
    uniform = math.log(record.model.vocabulary)
    bins = record.loss.by_position
    early = [one for one in bins if EARLY[0] <= one.first and one.last <= EARLY[1]]
    if early and bins[-1].first >= LEAST_WINDOW:
        sizes = [one.last - one.first + 1 for one in early]
        low, mean = (
            sum(size * value for size, value in zip(sizes, values, strict=True)) / sum(sizes)
            for values in ([one.nats.low for one in early], [one.nats.value for one in early])
        )
        late = bins[-1].nats.value
        if low > max(late + EARLY_SHARE * (uniform - late), late + LEAST_EXCESS):
            begun = "begin" if record.text.starts_with_bos else "do not begin"
            yield Finding(
                code="early_positions",
                question="loss",
                sentence=f"Tokens {EARLY[0]} to {EARLY[1]} of a window lose {mean:.1f} nats, those from "
                f"{bins[-1].first} on {late:.1f}, a uniform guess {uniform:.1f}: the model misses what its "
                f"texts began with. Windows {begun} with the begin token; try --bos "
                f"{'no' if record.text.starts_with_bos else 'yes'}.",
            )
    if record.loss.nats_per_token.low > UNIFORM_SHARE * uniform:
        yield Finding(
            code="near_uniform",
            question="loss",
            sentence=f"The loss, {record.loss.nats_per_token.value:.2f} nats per token, is near that of a "
            f"uniform guess, {uniform:.2f}: the model is untrained or damaged, or does not know this text, "
            "so the other answers say little about it.",
        )
