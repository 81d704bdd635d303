"""Training on states after a crash: it goes on, ends with the same bits, and believes only its own files."""

from __future__ import annotations

import json
import logging
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from fullrank.fit import checkpoints, comparison, loop, states, trainee, training
from fullrank.fit.setting import Setting, prepare
from fullrank.heads import Head, build

SCRIPT = Path(__file__).with_name("killed_training.py")
D, V, TIME, WINDOWS = 6, 40, 16, 28


@pytest.fixture
def setting() -> Setting:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(WINDOWS, TIME, D, generator=generator)
    targets = torch.randint(V, (WINDOWS, TIME), generator=generator)
    blocks = torch.arange(WINDOWS)[:, None].expand(WINDOWS, TIME)
    parts = states.split(states.Part(states=(hidden,), targets=targets, ids=targets, blocks=blocks))
    return prepare(head_of("softmax"), parts, rows=V, exact=True, matrix=True, limit=1 << 24, seed=0)


def head_of(name: str, **options: Any) -> Head:
    torch.manual_seed(1)
    head = build(name, hidden=D, vocab=V, **options)
    with torch.no_grad():
        head.decoder.weight.copy_(0.5 * torch.randn(V, D, generator=torch.Generator().manual_seed(2)))
    return head


Trained = tuple[training.Fitted, dict[str, Any]]


def trained(setting: Setting, file: Path | None, **changes: Any) -> Trained:
    plan = loop.Plan(**{"rates": (0.1, 0.4), "epochs": 3, "patience": 2, **changes})
    return training.train(setting, head_of("mos", components=2, dropout=0.2), plan, seed=0, file=file)


def same(one: Trained, other: Trained) -> bool:
    facts = [
        {name: value for name, value in vars(found).items() if name != "losses"} for found, _ in (one, other)
    ]
    return (
        facts[0] == facts[1]
        and torch.equal(one[0].losses, other[0].losses)
        and one[1].keys() == other[1].keys()
        and all(torch.equal(value, other[1][name]) for name, value in one[1].items())
    )


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint wherever one may be, and several steps a pass."""
    monkeypatch.setattr(loop, "EVERY", 0.0)
    monkeypatch.setattr(loop, "DEAREST", math.inf)
    monkeypatch.setattr(trainee, "LEAST_BATCH", 64)


class Crash(Exception):  # noqa: N818
    """In place of a signal."""


def crash_at(call: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Crash where a checkpoint would be written for the so manieth time."""
    keep, calls = checkpoints.keep, 0

    def crashing(*arguments: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == call:
            raise Crash
        keep(*arguments)

    monkeypatch.setattr(checkpoints, "keep", crashing)


def killed(folder: Path, kills: int, seed: int) -> list[int]:
    """Numbers of files that the kills left, after a comparison with what an undisturbed run found."""
    command = [sys.executable, str(SCRIPT), str(folder), str(kills), str(seed)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=one_thread())
    assert done.returncode == 0, done.stderr
    # No file was thought damaged or another's, though processes died while they wrote.
    assert done.stderr == ""
    straight, again = (json.loads((folder / f"{name}.json").read_text()) for name in ("straight", "killed"))
    assert again == straight
    left: list[int] = json.loads((folder / "kills.json").read_text())
    return left


def one_thread() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}


@pytest.mark.slow(reason="10 s, most of them imports; a crash at any step, below, needs no other process")
def test_a_killed_run_ends_as_an_undisturbed_one(tmp_path: Path) -> None:
    left = killed(tmp_path, 3, 0)
    assert max(left, default=0) > 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 6))
def test_a_run_killed_many_times_ends_as_an_undisturbed_one(seed: int, tmp_path: Path) -> None:
    left = killed(tmp_path, 12, seed)
    assert max(left) > 0


@pytest.mark.parametrize("call", [1, 2, 3, 5])
def test_a_crash_where_a_checkpoint_is_written_changes_nothing(
    call: int, setting: Setting, tmp_path: Path, eager: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    straight = trained(setting, None)
    file = tmp_path / "seed0.safetensors"
    with monkeypatch.context() as patched:
        crash_at(call, patched)
        with pytest.raises(Crash):
            trained(setting, file)
    assert bool(list(tmp_path.iterdir())) == (call > 1)
    assert same(trained(setting, file), straight)
    # What would have let it go on has gone; what it found has not, and is not looked for again.
    assert [path.name for path in tmp_path.iterdir()] == ["seed0.safetensors"]
    monkeypatch.setattr(loop.Run, "advance", None)
    assert same(trained(setting, file), straight)


def test_patience_is_counted_over_a_crash(
    setting: Setting, tmp_path: Path, eager: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Far too fast: every pass does harm, and the second is the last but for the fall.
    plans: dict[str, Any] = {"rates": (50.0,), "epochs": 30}
    straight = trained(setting, None, **plans)
    assert straight[0].steps == 0
    assert straight[0].converged
    file = tmp_path / "seed0.safetensors"
    with monkeypatch.context() as patched:
        # The second look at the text for choosing was not kept any more.
        crash_at(2, patched)
        with pytest.raises(Crash):
            trained(setting, file, **plans)
    assert same(trained(setting, file, **plans), straight)


def damage(file: Path, how: str, setting: Setting) -> None:
    content = bytearray(file.read_bytes())
    if how == "cut":
        file.write_bytes(content[: len(content) // 2])
    elif how == "empty":
        file.write_bytes(b"")
    elif how == "a flipped bit":
        content[-20] ^= 1
        file.write_bytes(content)
    else:
        other = file.with_name("other.safetensors")
        trained(setting, other, epochs=6)
        shutil.copy(other, file)
        other.unlink()


# A file is read the same way before its end and after it.
@pytest.mark.parametrize(
    ("done", "how"),
    [
        *((True, how) for how in ("cut", "empty", "a flipped bit", "of other settings")),
        *((False, how) for how in ("a flipped bit", "of other settings")),
    ],
)
def test_what_is_damaged_or_foreign_is_passed_over_with_a_line(
    how: str, done: bool, setting: Setting, tmp_path: Path, eager: None, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    straight = trained(setting, None)
    file = tmp_path / "seed0.safetensors"
    if done:
        trained(setting, file)
    else:
        with monkeypatch.context() as patched:
            crash_at(2, patched)
            with pytest.raises(Crash):
                trained(setting, file)
    (kept,) = tmp_path.iterdir()
    damage(kept, how, setting)
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        assert same(trained(setting, file), straight)
    (line,) = caplog.messages
    assert "begins anew" in line
    assert "\n" not in line
    assert ("another training" if how == "of other settings" else "damaged") in line


def test_other_states_are_another_training(
    setting: Setting, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "seed0.safetensors"
    first = trained(setting, file)
    setting.parts.fit.states[0][0, 0, 0] += 1e-3
    changed = prepare(setting.plain, setting.parts, rows=V, exact=True, matrix=True, limit=1 << 24, seed=0)
    with caplog.at_level(logging.WARNING):
        second = trained(changed, file)
    assert "another training" in caplog.text
    assert not same(first, second)
    assert same(second, trained(changed, None))


def test_a_comparison_that_was_done_is_read_and_not_made(
    setting: Setting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heads = {"mos": head_of("mos", components=2), "sigsoftmax": head_of("sigsoftmax")}
    settings = comparison.Settings(seeds=2, epochs=3, rates=(0.4,))

    def compared() -> comparison.Comparison:
        return comparison.compare(setting, heads, settings=settings, directory=tmp_path)

    first = compared()
    # A file a training: of the refit, the controls and the heads, with a second seed for two of them; what
    # has parameters beside W is trained without it first, and a mixture's directions before that.
    files = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.safetensors")}
    again = {first.best, first.control} - {comparison.ORIGINAL}
    trainings = {
        *(f"{name}/seed0" for name in ("refit", *first.fits)),
        *(f"{name}/seed1" for name in again),
    }
    apart = {f"{one}-fixed" for one in trainings if not one.startswith(("refit", "sigsoftmax"))}
    assert files == {f"{one}.safetensors" for one in trainings | apart | {"mos/split0"}}
    monkeypatch.setattr(loop.Run, "advance", None)
    second = compared()
    assert second.gain(second.best) == first.gain(first.best)
    for name, fits in first.fits.items():
        for one, other in zip(fits, second.fits[name], strict=True):
            assert same((one, {}), (other, {}))
    for name, weights in first.weights.items():
        assert all(torch.equal(value, second.weights[name][part]) for part, value in weights.items())
