"""Labels of an axis: wherever it begins and ends, a reader can tell values from them."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from fullrank.report.charts.axis import Axis


@given(
    low=st.floats(1e-12, 1e12),
    ratio=st.floats(1.0, 1e9),
    most=st.integers(5, 9),
    powers_of_two=st.booleans(),
)
def test_a_log_axis_has_labels_whatever_its_range(
    low: float, ratio: float, most: int, powers_of_two: bool
) -> None:
    axis = Axis(title="", log=True, powers_of_two=powers_of_two).fitted([low, low * ratio])
    ticks = axis.ticks(most)
    assert ticks is not None
    assert (2 if powers_of_two else 3) <= len(ticks) <= most + 1
    assert all(first < second for first, second in itertools.pairwise(ticks))
    assert axis.low is not None
    assert axis.high is not None
    assert axis.low * (1 - 1e-9) <= ticks[0] <= ticks[-1] <= axis.high * (1 + 1e-9)


def test_labels_are_round() -> None:
    # Perplexities of a run whose first evaluation is not far above its last.
    narrow = Axis(title="", log=True, low=157.0, high=171.0)
    assert narrow.ticks(6) == [157.5, 160.0, 162.5, 165.0, 167.5, 170.0]
    assert Axis(title="", log=True, low=66.0, high=140.0).ticks(6) == [80.0, 100.0, 120.0, 140.0]
    assert Axis(title="", log=True, low=0.26, high=0.44).ticks(6) == [0.3, 0.35, 0.4]
    assert Axis(title="", log=True, low=9.0, high=130.0).ticks(6) == [10.0, 20.0, 50.0, 100.0]
    assert Axis(title="", low=0.0, high=1.0).ticks(6) is None
