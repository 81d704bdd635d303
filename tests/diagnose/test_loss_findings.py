"""A loss that no trained model has, told by stated bounds from those that trained models have."""

from __future__ import annotations

import dataclasses
import math

import pytest

from fullrank.diagnose.loss_findings import EARLY_SHARE, UNIFORM_SHARE, findings
from fullrank.results.diagnosis import Diagnosis, Loss, PositionLoss
from tests.diagnosis_records import around, diagnosis, model_facts, text_facts

VOCABULARY = 50_000
UNIFORM = math.log(VOCABULARY)


def record(by_position: dict[tuple[int, int], float], mean: float, *, begun: bool = False) -> Diagnosis:
    return diagnosis(
        model=model_facts(vocabulary=VOCABULARY, tokens=VOCABULARY),
        text=text_facts(window=512, starts_with_bos=begun),
        loss=Loss(
            nats_per_token=around(mean, 0.1), standard_error=0.05, perplexity=around(math.exp(mean)),
            bits_per_byte=around(1.0), tokens=1, bytes=1, blocks=1,
            by_position=tuple(
                PositionLoss(first=first, last=last, nats=around(value, 0.5))
                for (first, last), value in by_position.items()
            ),
        ),
    )  # fmt: skip


# SmolLM2-135M-Instruct on the default text, without a begin token, as it was trained.
TRAINED = {
    (0, 1): 8.27, (2, 3): 6.79, (4, 7): 5.42, (8, 15): 4.56, (16, 31): 4.22, (32, 63): 3.17, (64, 127): 2.97,
    (128, 255): 2.75, (256, 510): 2.43,
}  # fmt: skip
# A model that had a begin token in training and has none now.
LOST = {(0, 1): 13.1, (2, 3): 12.4, (4, 7): 11.0, (8, 15): 9.2, (16, 31): 7.0, (32, 63): 5.4, (64, 510): 4.1}


def codes(made: Diagnosis) -> list[str]:
    return [finding.code for finding in findings(made)]


def test_a_trained_model_has_none() -> None:
    assert codes(record(TRAINED, 2.78)) == []


@pytest.mark.parametrize(("begun", "remedy"), [(False, "--bos yes"), (True, "--bos no")])
def test_a_lost_begin_token(begun: bool, remedy: str) -> None:
    (finding,) = findings(record(LOST, 4.9, begun=begun))
    assert (finding.code, finding.question) == ("early_positions", "loss")
    assert "lose 10.2 nats, those from 64 on 4.1, a uniform guess 10.8" in finding.sentence
    assert remedy in finding.sentence


def test_the_bound_is_the_stated_share_of_the_way_to_a_guess() -> None:
    late = 3.0
    bound = late + EARLY_SHARE * (UNIFORM - late)
    for shift, expected in ((0.49, []), (0.51, ["early_positions"])):
        early = dict.fromkeys([(2, 3), (4, 7), (8, 15)], bound + shift)
        # Half a nat of interval: its low end counts.
        assert codes(record({(0, 1): 9.0, **early, (64, 510): late}, 3.3)) == expected


def test_short_windows_say_nothing_about_later_positions() -> None:
    bins = {place: nats for place, nats in LOST.items() if place[1] < 32}
    assert codes(record(bins, 4.9)) == []


def test_a_loss_near_that_of_a_guess() -> None:
    flat = dict.fromkeys(TRAINED, UNIFORM)
    assert codes(record(flat, UNIFORM)) == ["near_uniform"]
    for shift, expected in ((0.09, []), (0.11, ["near_uniform"])):
        assert codes(record(TRAINED, UNIFORM_SHARE * UNIFORM + shift)) == expected


def test_no_loss_no_finding() -> None:
    assert codes(dataclasses.replace(record(LOST, 9.9), loss=None)) == []
