from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fullrank.report.figures import figure, interval, percent, perplexity_share, whole_interval, with_interval
from fullrank.results import Estimate

anything = st.floats(allow_nan=True, allow_infinity=True)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (49152, "49,152"),
        (True, "yes"),
        (None, "–"),
        (0.000123456, "0.0001235"),
        (51_234.0, "51,234"),
        (-0.5, "−0.5"),
        (math.nan, "nan"),
        (-math.inf, "−inf"),
        (Estimate(value=3.24041, low=3.2034, high=3.2774), "3.240"),
        (Estimate(value=301.4, low=250.2, high=379.8), "301"),
    ],
)
def test_figure(value: object, text: str) -> None:
    assert figure(value) == text  # type: ignore[arg-type]


def test_an_interval_has_the_digits_of_its_width() -> None:
    assert with_interval(Estimate(value=0.0123, low=0.0041, high=0.0209)) == "0.012 (0.004 to 0.021)"
    assert interval(Estimate(value=-0.5, low=-1.25, high=0.25)) == "−1.2 to 0.2"
    assert interval(Estimate(value=1.0, low=math.nan, high=2.0)) == ""
    assert whole_interval(Estimate(value=301.4, low=250.2, high=379.8)) == "250 to 380"
    # What is not zero does not read as zero, unless nobody would call it anything else; zero has no sign.
    assert interval(Estimate(value=0.01, low=0.0004, high=0.0196)) == "0.0004 to 0.0196"
    assert interval(Estimate(value=0.0, low=-1e-9, high=0.8)) == "0.00 to 0.80"
    assert interval(Estimate(value=0.3, low=-math.inf, high=math.inf)) == ""


def test_a_share_that_is_not_nothing_never_reads_as_nothing() -> None:
    assert percent(0.0142) == "1.4%"
    assert percent(4 / 49152) == "0.01%"
    assert percent(49151 / 49152) == "99.998%"
    assert percent(0.0) == "0.0%"
    assert percent(math.nan) == "nan%"


def test_share_of_the_perplexity() -> None:
    assert perplexity_share(0.02) == pytest.approx(1 - math.exp(-0.02))
    assert perplexity_share(-1e9) == -math.inf
    assert perplexity_share(math.inf) == 1


@given(anything, anything, anything)
def test_any_estimate_can_be_written(value: float, low: float, high: float) -> None:
    estimate = Estimate(value=value, low=low, high=high)
    assert 0 < len(with_interval(estimate)) < 60
    assert len(whole_interval(estimate)) < 40
    assert percent(perplexity_share(value)).endswith("%")
