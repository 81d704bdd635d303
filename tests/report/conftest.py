from __future__ import annotations

import math

import pytest

from fullrank.results import Ladder, LadderRung, Provenance

PAYLOAD = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"' {{ 7 * 7 }}"


def rung(
    head: str, width: int, *, kl: float, floor: float, least_rank: int, components: int = 1
) -> LadderRung:
    return LadderRung(
        head=head,
        width=width,
        components=components,
        parameters=1000 * width + components,
        least_rank=least_rank,
        kl=kl,
        floor=floor,
        seconds=11.25,
    )


@pytest.fixture(scope="session")
def made() -> Provenance:
    return Provenance(
        command="fullrank demo --out runs/demo",
        commit="3f9c1e0a7d2b4c5e6f708192a3b4c5d6e7f80912",
        time="2026-03-05T14:02:11+00:00",
        device="cpu, 2 threads",
        seed=17,
        versions={"python": "3.12.3", "torch": "2.13.0"},
    )


@pytest.fixture(scope="session")
def ladder() -> Ladder:
    return Ladder(
        contexts=512,
        vocabulary=256,
        least_rank=24,
        small_width=8,
        steps=4000,
        entropy=3.41273,
        rungs=(
            rung("mos", 8, components=8, kl=0.06231, floor=0.40871, least_rank=255),
            rung("softmax", 24, kl=0.0007123, floor=3.1e-13, least_rank=24),
            rung("softmax", 8, kl=0.42137, floor=0.40871, least_rank=8),
            rung("softmax", 16, kl=0.11874, floor=0.11021, least_rank=16),
            rung("sigsoftmax", 8, kl=0.30111, floor=0.40871, least_rank=117),
        ),
    )


@pytest.fixture(scope="session")
def odd() -> Ladder:
    """Everything that a record may hold and no one expects."""
    return Ladder(
        contexts=3,
        vocabulary=5,
        least_rank=4,
        small_width=2,
        steps=1,
        entropy=math.nan,
        rungs=(
            rung("softmax", 2, kl=math.inf, floor=0.0, least_rank=2),
            rung("softmax", 2, kl=0.3, floor=0.2, least_rank=2),
            rung("softmax", 4, kl=0.0, floor=math.nan, least_rank=4),
            rung(PAYLOAD, 2, kl=math.nan, floor=0.21, least_rank=3),
            rung("a_name_of_many_words_" * 9, 2, kl=-1e-12, floor=0.21, least_rank=3, components=12345),
            rung("nul \x00, half a pair \ud800, two\nlines", 2, kl=1e-9, floor=math.nan, least_rank=0),
        ),
    )


@pytest.fixture(scope="session")
def payload() -> str:
    return PAYLOAD
