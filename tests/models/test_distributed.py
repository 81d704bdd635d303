"""Two processes on a CPU, with FSDP2 and with the Trainer: the losses and weights of one process."""

from __future__ import annotations

import contextlib
import copy
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fullrank.upgrade import upgrade

SCRIPT = Path(__file__).with_name("two_processes.py")
CASES = (
    "trainer tied",
    "layers tied",
    "head untied",
    "matrix untied",
    "accelerate tied",
    "accelerate untied",
)
SECONDS = 300


def finished(command: list[str], folder: Path) -> None:
    """Run it to its end; after a hang nothing of its session is left running."""
    with (folder / "said.txt").open("w") as said:
        parent = subprocess.Popen(
            command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=said, stderr=said,
            start_new_session=True,
        )  # fmt: skip
    code = None
    with contextlib.suppress(subprocess.TimeoutExpired):
        code = parent.wait(SECONDS)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(parent.pid, signal.SIGKILL)
    parent.wait()
    assert code == 0, f"exit code {code}\n{(folder / 'said.txt').read_text()}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("processes")
    finished([sys.executable, str(SCRIPT), str(folder), *CASES], folder)
    return folder


def compare(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-6)
    assert expected["losses"][1] < expected["losses"][0]
    assert found["weights"].keys() == expected["weights"].keys()
    for name, weight in expected["weights"].items():
        torch.testing.assert_close(found["weights"][name], weight, atol=1e-6, rtol=1e-5)


@pytest.mark.slow(reason="three processes a case; training in two is in the default tier in tests/train")
@pytest.mark.parametrize("case", CASES)
def test_two_processes_are_one(case: str, folder: Path) -> None:
    compare(torch.load(folder / f"two-{case}.pt"), torch.load(folder / f"one-{case}.pt"))


def test_the_head_is_no_unit_of_fsdp_whenever_it_was_built(
    tiny_model: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A unit would lie across those that accelerate makes of the matrix and of a tied embedding."""
    model = upgrade(tiny_model(), "mos")
    assert model._no_split_modules == {"LlamaDecoderLayer", "MixtureOfSoftmaxes"}
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    assert model._no_split_modules == copy.deepcopy(model)._no_split_modules == {"LlamaDecoderLayer"}


@pytest.mark.slow
@pytest.mark.parametrize("case", ["trainer tied", "accelerate untied"])
def test_torchrun(case: str, folder: Path) -> None:
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    finished([sys.executable, *launch, str(SCRIPT), str(folder), case], folder)
    compare(torch.load(folder / f"torchrun-{case}.pt"), torch.load(folder / f"one-{case}.pt"))
