"""Fewer simulations of level curves, for tests of training curves."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from fullrank.diagnose.series import correlated_noise


@contextlib.contextmanager
def simulations(count: int = 4000) -> Iterator[None]:
    """Hold a curve against so many level curves: a p-value of 0.01 is 40 of 4,000."""
    caches = (correlated_noise.null, correlated_noise.smallest)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(correlated_noise, "SIMULATIONS", count)
        for cache in caches:
            cache.cache_clear()
        yield
    for cache in caches:
        cache.cache_clear()


@pytest.fixture(scope="module")
def few_simulations() -> Iterator[None]:
    with simulations():
        yield
