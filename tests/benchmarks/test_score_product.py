"""The product whose scores leave as exponentials, in Triton's interpreter."""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch

interpreted = importlib.util.find_spec("triton") is not None and os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = pytest.mark.skipif(not interpreted, reason="needs Triton's interpreter")


@pytest.mark.parametrize("way", ["plain", "persistent"])
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
def test_exponentials_and_sums_are_those_of_the_softmax(way: str) -> None:
    """Near the anchor, and a hundred nats above it, where a row is made anew."""
    from benchmarks.score_product import Tile, draw, error

    tile = Tile(64, 64, 32, 4, 2, persistent=way == "persistent", halves=way == "persistent")
    for far in (False, True):
        chunk = draw(70, 40, 150, "cpu")
        if far:
            # The last entry, which no sample sees, lies far above all others in one row.
            chunk.w[149] = 4 * chunk.x[3]
            assert float(chunk.x[3].float() @ chunk.w[149].float()) > 100
        assert error(chunk, tile) < 2.1
        assert torch.isfinite(chunk.rest).all()
