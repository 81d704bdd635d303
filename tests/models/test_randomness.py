"""Random states are restored wherever they were seeded: two pretended GPUs, since one may be all there is."""

from __future__ import annotations

import pytest
import torch

from fullrank.fit import loop
from fullrank.models.randomness import restored_randomness, seed_generators
from tests.fit.test_loop import PLAN, Noisy

BEFORE = {0: 10, 1: 11}


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """The state of each GPU's generator."""
    states = dict(BEFORE)

    def index(device: int | torch.device) -> int:
        return device if isinstance(device, int) else device.index

    def restore(state: torch.Tensor, device: int | torch.device) -> None:
        states[index(device)] = int(state)

    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(states))
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: torch.tensor(states[index(device)]))
    monkeypatch.setattr(torch.cuda, "set_rng_state", restore)
    monkeypatch.setattr(
        torch.cuda, "manual_seed_all", lambda seed: states.update(dict.fromkeys(states, seed))
    )
    return states


@pytest.mark.parametrize("device", ["cuda", "cuda:0", "cuda:1"])
def test_every_gpu_that_a_computation_seeds_is_restored(gpus: dict[int, int], device: str) -> None:
    with restored_randomness(torch.device(device)):
        seed_generators(5, torch.device(device))
        assert gpus == {0: 5, 1: 5}
    assert gpus == BEFORE


def test_a_fit_on_the_cpu_leaves_every_gpu_alone(
    gpus: dict[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Only the fit's module looks: an optimiser that believed in a GPU would ask it for its stream.
    monkeypatch.setattr(loop.captured.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    loop.fit(Noisy, PLAN, seed=0)
    assert gpus == BEFORE
