"""Records survive the round trip, a file that cannot be read says why, writing is whole or not at all."""

from __future__ import annotations

import fcntl
import json
import math
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fullrank import results
from fullrank.errors import FullrankError
from fullrank.results import Ladder, LadderRung, Provenance, load, provenance, save, write_whole

MADE = Provenance(
    command="fullrank demo",
    commit="",
    time="2026-01-01T00:00:00+00:00",
    device="cpu",
    seed=None,
    versions={"a": "1"},
)


def rung(**changed: Any) -> LadderRung:
    values: dict[str, Any] = {
        "head": "mos",
        "width": 4,
        "components": 3,
        "parameters": 100,
        "least_rank": 9,
        "kl": 0.1,
        "floor": 0.5,
        "seconds": 1.5,
    }
    return LadderRung(**values | changed)


def ladder(*rungs: LadderRung) -> Ladder:
    return Ladder(
        contexts=5,
        vocabulary=7,
        least_rank=3,
        small_width=2,
        steps=10,
        entropy=1.25,
        rungs=rungs or (rung(),),
    )


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "new" / "folder" / "results.json"


def test_user_errors_are_value_errors() -> None:
    assert issubclass(FullrankError, ValueError)


def test_record_survives_the_round_trip(path: Path) -> None:
    record = ladder(rung(), rung(head="softmax", floor=0.25, kl=1e-300))
    save(record, path, MADE)
    assert load(path) == (record, MADE)


def test_non_finite_numbers_survive_the_round_trip(path: Path) -> None:
    record = ladder(rung(kl=math.inf, floor=-math.inf), rung(kl=math.nan))
    save(record, path, MADE)
    found, _ = load(path)
    assert found.rungs[0].kl == math.inf
    assert found.rungs[0].floor == -math.inf
    assert math.isnan(found.rungs[1].kl)
    json.loads(path.read_text(encoding="utf8"), parse_constant=pytest.fail)


def test_numpy_numbers_are_numbers(path: Path) -> None:
    save(ladder(rung(kl=np.float64("inf"), floor=np.float64(0.5))), path, MADE)
    found, _ = load(path)
    assert found.rungs[0].kl == math.inf
    assert found.rungs[0].floor == 0.5


def test_whole_numbers_are_read_as_floats_where_floats_belong(path: Path) -> None:
    path.parent.mkdir(parents=True)
    changed(lambda it: it.update(entropy=1))(path)
    found, _ = load(path)
    assert found.entropy == 1.0
    assert type(found.entropy) is float


def test_provenance_describes_this_process() -> None:
    made = provenance(seed=7, device="cpu")
    assert made.seed == 7
    assert {"python", "fullrank", "torch", "numpy"} <= made.versions.keys()
    assert all(made.versions.values())
    assert made.command
    assert not made.command.startswith("/")


def changed(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    """Writes a record's file and edits its document."""

    def write(path: Path) -> None:
        save(ladder(), path, MADE)
        document = json.loads(path.read_text(encoding="utf8"))
        change(document)
        path.write_text(json.dumps(document), encoding="utf8")

    return write


NO_JSON, NO_RESULT, NO_FIELDS = (
    "is not JSON",
    "is not a fullrank result",
    "does not hold the fields of a 'ladder'",
)
REFUSALS: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (lambda path: None, r"no results at .*results\.json: run the command"),
    "folder": (Path.mkdir, "cannot be read"),
    "empty": (lambda path: path.write_bytes(b""), NO_JSON),
    "cut": (lambda path: path.write_bytes(b"{"), NO_JSON),
    "no text": (lambda path: path.write_bytes(b"\xff\xfe\x00"), NO_JSON),
    "list": (lambda path: path.write_text("[]"), NO_RESULT),
    "no kind": (lambda path: path.write_text("{}"), NO_RESULT),
    "kind alone": (lambda path: path.write_text('{"kind": "ladder"}'), NO_RESULT),
    "unknown kind": (changed(lambda it: it.update(kind="stairs")), "this version reads .*ladder"),
    "kind that is a list": (changed(lambda it: it.update(kind=["ladder"])), "this version reads .*ladder"),
    **{
        f"version {version}": (
            changed(lambda it, version=version: it.update(version=version)),
            rf"version {version} .*reads version {Ladder.version}.*again",
        )
        for version in (0, 99, "1", None)
    },
    **{
        name: (changed(change), rf"{NO_FIELDS}.*again")
        for name, change in {
            "missing field": lambda it: it.pop("entropy"),
            "missing field of a rung": lambda it: it["rungs"][0].pop("kl"),
            "missing provenance": lambda it: it["made"].pop("command"),
            "unknown field": lambda it: it.update(colour="red"),
            "text for a number": lambda it: it.update(entropy="high"),
            "float for a whole number": lambda it: it.update(steps=1.5),
            "truth value for a whole number": lambda it: it.update(steps=True),
            "nothing for a number": lambda it: it.update(entropy=None),
            "number for text": lambda it: it["rungs"][0].update(head=3),
            "no list": lambda it: it.update(rungs=3),
            "data is a list": lambda it: it.update(data=[]),
            "data is nothing": lambda it: it.update(data=None),
            "made is text": lambda it: it.update(made="yesterday"),
        }.items()
    },
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSALS)
def test_refusals(case: str, tmp_path: Path) -> None:
    write, words = REFUSALS[case]
    path = tmp_path / "results.json"
    write(path)
    with pytest.raises(FullrankError, match=words):
        load(path)


def test_every_kind_is_registered_under_its_own_name() -> None:
    assert all(cls.kind == kind for kind, cls in results.KINDS.items())  # type: ignore[attr-defined]


def test_writing_replaces_the_old_file_and_leaves_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "file.txt"
    write_whole(path, "old")
    write_whole(path, "new, ünïcode")
    assert path.read_text(encoding="utf8") == "new, ünïcode"
    assert os.listdir(tmp_path) == ["file.txt"]


def test_what_a_killed_writer_left_goes_and_what_another_writes_stays(tmp_path: Path) -> None:
    path, others = tmp_path / "file.txt", [".file.txt.note", ".other.txt.abcd1234", ".file.txt.a_longer_one"]
    left, held = tmp_path / ".file.txt.abcd1234", tmp_path / ".file.txt.efgh5678"
    for name in (left.name, held.name, *others):
        (tmp_path / name).write_text("half")
    os.mkfifo(tmp_path / ".file.txt.pipe1234")
    with held.open("rb") as writing:
        fcntl.flock(writing, fcntl.LOCK_EX)
        write_whole(path, "whole")
    assert not left.exists()
    assert all((tmp_path / name).exists() for name in (held.name, ".file.txt.pipe1234", *others))
    write_whole(path, "again")
    assert not held.exists()


def test_a_result_is_as_readable_as_any_new_file(tmp_path: Path) -> None:
    (tmp_path / "plain").write_text("")
    write_whole(tmp_path / "whole", "")
    modes = [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("plain", "whole")]
    assert modes[0] == modes[1]


@pytest.mark.parametrize("step", ["chmod", "replace"])
def test_failed_write_leaves_the_old_file_and_no_leftover(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    path = tmp_path / "results.json"
    save(ladder(), path, MADE)
    before = path.read_bytes()

    def fail(*_: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(results.files.os, step, fail)
    with pytest.raises(OSError, match="no space left"):
        save(ladder(rung(), rung()), path, MADE)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["results.json"]


def test_text_that_cannot_be_encoded_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "file.txt"
    write_whole(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_whole(path, "half a character: \ud800")
    assert path.read_text(encoding="utf8") == "old"
    assert os.listdir(tmp_path) == ["file.txt"]


def test_what_json_cannot_hold_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    save(ladder(), path, MADE)
    before = path.read_bytes()
    with pytest.raises(TypeError):
        save(ladder(rung(kl=1j)), path, MADE)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["results.json"]


def test_a_folder_in_the_way_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "results.json").mkdir()
    with pytest.raises(OSError, match=r"results\.json"):
        save(ladder(), tmp_path / "results.json", MADE)
    assert os.listdir(tmp_path) == ["results.json"]
