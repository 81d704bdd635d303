"""What is no regular file, or far too large, is refused before it is opened."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fullrank.errors import FullrankError
from fullrank.results import files, reading


@pytest.fixture
def pipe(tmp_path: Path) -> Path:
    os.mkfifo(tmp_path / "pipe")
    return tmp_path / "pipe"


def test_a_pipe_is_not_waited_for(pipe: Path) -> None:
    for read in (reading.read_bytes, reading.read_text, reading.read_json, files.sha256, files.load):
        with pytest.raises(FullrankError, match="is a named pipe, expected a regular file"):
            read(pipe)


@pytest.mark.parametrize("device", ["/dev/zero", "/dev/null"])
def test_a_device_is_not_read(device: str, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(device)
    for path in (device, link):
        with pytest.raises(FullrankError, match="is a device, expected a regular file"):
            reading.read_text(path)


def test_nothing_is_written_in_place_of_a_pipe(pipe: Path) -> None:
    with pytest.raises(FullrankError, match="is a named pipe"):
        files.write_whole(pipe, "text")
    assert pipe.is_fifo()


def test_a_missing_file_is_the_readers_to_complain_of(tmp_path: Path) -> None:
    reading.require_regular(tmp_path / "none")
    with pytest.raises(FileNotFoundError):
        reading.read_text(tmp_path / "none")


def test_a_directory_with_a_pipe_in_it_is_not_plain(tmp_path: Path, pipe: Path) -> None:
    with pytest.raises(FullrankError, match="pipe is a named pipe"):
        reading.require_plain(tmp_path)
    pipe.unlink()
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    reading.require_plain(tmp_path)
    with pytest.raises(FullrankError, match="cannot be read"):
        reading.require_plain(tmp_path / "none")


def test_a_file_beyond_memory_is_not_read(tmp_path: Path) -> None:
    large = tmp_path / "large.json"
    with large.open("wb") as file:
        # A hole: it takes no room on the disk.
        file.truncate(reading.memory())
    with pytest.raises(FullrankError, match="too many to read at once"):
        reading.read_json(large)


def test_json_that_never_ends_to_open_is_no_json(tmp_path: Path) -> None:
    deep = tmp_path / "deep.json"
    deep.write_text("[" * 100_000)
    with pytest.raises(ValueError, match="nested too deeply"):
        reading.read_json(deep)
    with pytest.raises(FullrankError, match=r"deep\.json is not JSON"):
        files.load(deep)


def test_memory_is_what_this_machine_has() -> None:
    assert 1 << 28 < reading.memory() <= 1 << 50
