"""Checkpoints: whole or not at all, checked when read, and a full disk costs nothing that was there."""

from __future__ import annotations

import contextlib
import json
import resource
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from fullrank.errors import FullrankError
from fullrank.train import checkpoint
from fullrank.train.checkpoint import MANIFEST, Damaged, found, newest, prune, read, write


def groups(seed: int, size: int = 50) -> dict[str, dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "model": {
            "a.weight": torch.randn(size, 3, generator=generator),
            "b": torch.randn(3, size, generator=generator).t(),
        },
        "optimiser": {"a.weight/step": torch.tensor(float(seed)), "a.weight/sum": torch.ones(2)},
        "carried": {},
    }


def put(folder: Path, step: int, kind: str = "step", best: int | None = None, size: int = 50) -> Path:
    state = {"step": step, "history": [0.1, step / 3], "best_step": best}
    return write(folder, kind, step, groups(step, size), state)


def same(stored: checkpoint.Stored, step: int) -> bool:
    expected = groups(step)
    assert stored.groups.keys() == expected.keys()
    return all(
        stored.groups[group].keys() == tensors.keys()
        and all(torch.equal(stored.groups[group][name], tensor) for name, tensor in tensors.items())
        for group, tensors in expected.items()
    )


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = put(tmp_path / "deep" / "checkpoints", 12)
    stored = read(path)
    assert path.name == "step-00000012"
    assert (stored.path, stored.step) == (path, 12)
    # Floats come back to the last bit.
    assert stored.state == {"step": 12, "history": [0.1, 4.0], "best_step": None}
    assert same(stored, 12)
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def test_no_pickle(tmp_path: Path) -> None:
    path = put(tmp_path, 1)
    assert {file.suffix for file in path.iterdir()} == {".safetensors", ".json"}


def test_one_of_the_same_name_is_replaced(tmp_path: Path) -> None:
    put(tmp_path, 3)
    path = write(tmp_path, "step", 3, {"model": {"other": torch.ones(1)}}, {})
    assert read(path).groups.keys() == {"model"}
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


def test_many_steps_stay_in_order(tmp_path: Path) -> None:
    for step in (99_999_999, 100_000_000, 7):
        put(tmp_path, step)
    assert [checkpoint.step_of(path) for path in found(tmp_path, "step")] == [7, 99_999_999, 100_000_000]


def damage_flip(file: Path, at: float) -> None:
    data = bytearray(file.read_bytes())
    data[int(at * (len(data) - 1))] ^= 0x10
    file.write_bytes(data)


FILES = ("model.safetensors", "optimiser.safetensors", "carried.safetensors", MANIFEST)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("how", ["first", "middle", "last", "truncate", "empty", "delete", "longer"])
def test_a_damaged_one_is_passed_over(tmp_path: Path, name: str, how: str) -> None:
    put(tmp_path, 10)
    path = put(tmp_path, 20)
    file = path / name
    if how == "delete":
        file.unlink()
    elif how == "longer":
        file.write_bytes(file.read_bytes() + b"}")
    elif how in ("truncate", "empty"):
        file.write_bytes(file.read_bytes()[: -1 if how == "truncate" else 0])
    else:
        damage_flip(file, {"first": 0.0, "middle": 0.5, "last": 1.0}[how])
    with pytest.raises(Damaged):
        read(path)
    said: list[str] = []
    stored = newest(tmp_path, said.append)
    assert stored is not None
    assert stored.step == 10
    assert same(stored, 10)
    assert len(said) == 1
    assert "step-00000020" in said[0]
    assert "the checkpoint before it is used" in said[0]
    # Out of the way, not gone, and not asked about again.
    assert (tmp_path / "damaged-step-00000020").is_dir()
    assert newest(tmp_path, said.append) is not None
    assert len(said) == 1


@pytest.mark.parametrize("name", FILES)
def test_every_byte_counts(tmp_path: Path, name: str) -> None:
    path = put(tmp_path, 20, size=2)
    file = path / name
    good = file.read_bytes()
    missed = []
    for at in range(0, len(good), 3):
        file.write_bytes(good[:at] + bytes([good[at] ^ 0x01]) + good[at + 1 :])
        try:
            read(path)
            missed.append(chr(good[at]))
        except FullrankError:
            # Damaged, or another version: refused either way, in a sentence.
            continue
    # White space between the words of JSON says nothing; one bit off it is still white or no JSON.
    assert not "".join(missed).strip()


def test_all_damaged_is_said_and_nothing_moves(tmp_path: Path) -> None:
    for step in (10, 20):
        damage_flip(put(tmp_path, step) / "model.safetensors", 0.5)
    before = content(tmp_path)
    said: list[str] = []
    for _ in range(2):
        # Again and again: a second look must not take the run for a new one.
        with pytest.raises(FullrankError, match="every checkpoint") as caught:
            newest(tmp_path, said.append)
        assert not isinstance(caught.value, Damaged)
    assert content(tmp_path) == before
    assert not said


def test_another_version_is_an_error_and_not_damage(tmp_path: Path) -> None:
    put(tmp_path, 10)
    file = put(tmp_path, 20) / MANIFEST
    file.write_text(json.dumps({**json.loads(file.read_text()), "version": 99}))
    with pytest.raises(FullrankError, match="version 99") as caught:
        newest(tmp_path, lambda message: None)
    assert not isinstance(caught.value, Damaged)
    assert found(tmp_path, "step")[-1].name == "step-00000020"


def test_one_under_another_name_is_damaged(tmp_path: Path) -> None:
    put(tmp_path, 20).rename(tmp_path / "step-00000030")
    put(tmp_path, 40, "best").rename(tmp_path / "step-00000040")
    for step in (30, 40):
        with pytest.raises(Damaged, match="says that it is"):
            read(tmp_path / f"step-{step:08d}")


@pytest.mark.parametrize("name", ["../outside.safetensors", "/etc/passwd", "model.pt"])
def test_a_manifest_leads_nowhere_else(tmp_path: Path, name: str) -> None:
    path = put(tmp_path, 20)
    manifest = json.loads((path / MANIFEST).read_text())
    manifest["files"][name] = {"sha256": "0", "bytes": 0}
    manifest["sha256"] = checkpoint._manifest_digest(manifest)
    (path / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(Damaged, match="no checkpoint has"):
        read(path)


def test_nothing_there(tmp_path: Path) -> None:
    assert newest(tmp_path / "none", lambda message: None) is None
    assert found(tmp_path / "none", "best") == []
    checkpoint.clean(tmp_path / "none")


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_the_last_ones_are_kept_and_the_best_they_name(tmp_path: Path, keep: int) -> None:
    best = {10: 10, 20: 10, 30: 30, 40: 30}
    for step, at in best.items():
        if at == step:
            put(tmp_path, step, "best")
        put(tmp_path, step, best=at)
        prune(tmp_path, keep)
        kept = [checkpoint.step_of(path) for path in found(tmp_path, "step")]
        assert kept == [one for one in best if one <= step][-keep:]
        # The newest may turn out damaged: the one before it needs its own best.
        assert [checkpoint.step_of(path) for path in found(tmp_path, "best")] == sorted(
            {best[one] for one in kept}
        )
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_best_weights_of_a_future_that_is_lived_again_go(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        put(tmp_path, step, "best")
    checkpoint.drop(tmp_path, "best", after=20)
    assert [checkpoint.step_of(path) for path in found(tmp_path, "best")] == [10, 20]


def test_leftovers_are_removed_and_nothing_else(tmp_path: Path) -> None:
    put(tmp_path, 10)
    put(tmp_path, 10, "best")
    before = content(tmp_path)
    shutil.copytree(tmp_path / "step-00000010", tmp_path / ".writing-step-00000020-77")
    (tmp_path / ".writing-step-00000020-77" / MANIFEST).unlink()
    assert [path.name for path in found(tmp_path, "step")] == ["step-00000010"]
    checkpoint.clean(tmp_path)
    assert content(tmp_path) == before


def fill(path: Path) -> None:
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(b"\0" * 4096)


class TestFullDisk:
    def check(self, folder: Path, expected: str) -> None:
        """The next write fails with a sentence, and what was there stays as it is."""
        before = content(folder)
        with pytest.raises(FullrankError) as caught:
            put(folder, 20, size=60_000)
        message = str(caught.value)
        assert expected in message
        assert "step-00000020 could not be written" in message
        assert "step-00000010 is intact" in message
        assert "\n" not in message
        assert content(folder) == before
        assert [path.name for path in folder.iterdir()] == ["step-00000010"]
        stored = newest(folder, pytest.fail)
        assert stored is not None
        assert same(stored, 10)

    def test_files_of_limited_size(self, tmp_path: Path) -> None:
        put(tmp_path, 10)
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, hard))
        try:
            self.check(tmp_path, "File too large")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    def test_a_small_disk(self, small_disk: Path) -> None:
        put(small_disk, 10)
        self.check(small_disk, "the disk is full")

    def test_a_disk_full_to_the_last_byte(self, small_disk: Path) -> None:
        put(small_disk, 10)
        fill(small_disk / "filler")
        with pytest.raises(FullrankError, match="the disk is full"):
            put(small_disk, 20)
        assert sorted(path.name for path in small_disk.iterdir()) == ["filler", "step-00000010"]
        assert same(read(small_disk / "step-00000010"), 10)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real one of 1 MiB, where mounting is permitted."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("mounting needs rights that this process has not")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(FullrankError, match="there is no earlier one"):
        put(tmp_path / "file" / "checkpoints", 10)
