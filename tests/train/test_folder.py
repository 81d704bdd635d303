"""A run directory: who holds it, what it may be used for, and how it is read back."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from fullrank import filelock
from fullrank.errors import FullrankError
from fullrank.text import store as data
from fullrank.train import checkpoint, folder
from fullrank.train.config import Config, DataConfig, override, to_json
from fullrank.train.loop import Options, train
from fullrank.train.model import build
from fullrank.train.recipes import recipe

SETTINGS = [
    "body.hidden=8", "body.last=6", "head.width=6", "head.components=2", "batch=4", "length=5", "steps=6",
    "evaluate_every=2", "evaluate_batch=2", "optimiser.lr=0.02", "keep=3", "data.vocabulary_from=all",
]  # fmt: skip


def config(*settings: str) -> Config:
    return override(recipe("awd-lstm", "mos"), [*SETTINGS, *settings])


def texts(path: Path, seed: int = 0) -> Path:
    draw = np.random.default_rng(seed)
    path.mkdir(parents=True, exist_ok=True)
    for split, count in (("train", 201), ("valid", 41), ("test", 31)):
        words = draw.integers(0, 12, count)
        rows = [" ".join(f"w{word}" for word in words[at : at + 10]) for at in range(0, count, 10)]
        (path / f"{split}.txt").write_text("\n".join(rows) + "\n")
    return path


def content(path: Path) -> dict[str, bytes]:
    return {str(one.relative_to(path)): one.read_bytes() for one in path.rglob("*") if one.is_file()}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("folder")
    out = place / "run"
    train(
        config(),
        Options(
            data=(texts(place / "text"),), out=out, cache=place / "cache", device="cpu", trackers=(),
            monitors=False,
        ),
    )  # fmt: skip
    return out


def test_one_process_at_a_time(tmp_path: Path) -> None:
    with folder.locked(tmp_path / "run"):
        with pytest.raises(FullrankError, match="in use by another process"), folder.locked(tmp_path / "run"):
            pass
        # Another directory is another matter.
        with folder.locked(tmp_path / "other"):
            pass
    with folder.locked(tmp_path / "run"):
        pass


def test_without_locks_no_run_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on Windows."""
    monkeypatch.setattr(filelock, "SUPPORTED", False)
    with pytest.raises(FullrankError, match="works on Linux and macOS only"):
        folder.locked(tmp_path / "run").__enter__()
    assert not (tmp_path / "run").exists()


def test_a_lock_file_that_nobody_holds_is_nothing(tmp_path: Path) -> None:
    (tmp_path / ".lock").touch()
    with folder.locked(tmp_path), (tmp_path / ".lock").open() as file, pytest.raises(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)


def test_a_directory_of_something_else_stays_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(FullrankError, match=r"is no run and not empty \(it holds notes.txt\)"):
        folder.locked(tmp_path).__enter__()
    assert content(tmp_path) == {"notes.txt": b"mine"}


@pytest.mark.parametrize("text", ['{"model_type": "gpt2"}', "[]", "{", '{"config": 1, "data": "x"}'])
def test_another_programs_config_stays_as_it_is(tmp_path: Path, text: str) -> None:
    # A directory of a transformers model has a config.json too.
    (tmp_path / "run.json").write_text(text)
    for refuse in (lambda: folder.locked(tmp_path).__enter__(), lambda: folder.check(tmp_path, config(), "")):
        with pytest.raises(FullrankError, match="is not what `fullrank train` writes"):
            refuse()
    assert content(tmp_path) == {"run.json": text.encode()}


def test_what_a_kill_during_the_first_second_leaves_is_no_obstacle(tmp_path: Path) -> None:
    (tmp_path / "tokens").mkdir()
    for name in (".lock", ".run.json.x8f3", ".log.jsonl.ab"):
        (tmp_path / name).write_text("half")
    with folder.locked(tmp_path):
        folder.check(tmp_path, config(), "digest")
        folder.clean(tmp_path)
    assert sorted(one.name for one in tmp_path.iterdir()) == [".lock", "tokens"]


def test_a_run_begun_before_a_setting_existed_goes_on_with_its_default(tmp_path: Path) -> None:
    folder.claim(tmp_path, config(), "one")
    checkpoint.write(tmp_path / "checkpoints", "step", 3, {"model": {"a": torch.ones(1)}}, {})
    document = json.loads((tmp_path / "run.json").read_text())
    del document["config"]["head"]["lift"]
    (tmp_path / "run.json").write_text(json.dumps(document))
    folder.check(tmp_path, config(), "one")
    with pytest.raises(FullrankError, match=r"head.lift was 0.0 and is 2.0"):
        folder.check(tmp_path, config("head.lift=2"), "one")


def test_another_config_or_other_data_is_refused(tmp_path: Path) -> None:
    folder.claim(tmp_path, config(), "one")
    # Nothing was trained yet: it may be begun otherwise.
    folder.check(tmp_path, config("steps=9"), "two")
    checkpoint.write(tmp_path / "checkpoints", "step", 3, {"model": {"a": torch.ones(1)}}, {})
    folder.check(tmp_path, config(), "one")
    with pytest.raises(FullrankError, match="other data"):
        folder.check(tmp_path, config(), "two")
    with pytest.raises(FullrankError, match=r"another config \(optimiser.lr was 0.02 and is 0.1; seed was 0"):
        folder.check(tmp_path, config("seed=3", "optimiser.lr=0.1"), "one")


def test_a_claim_on_ones_own_run_changes_nothing(tmp_path: Path) -> None:
    folder.claim(tmp_path, config(), "one")
    file = tmp_path / "run.json"
    before = file.stat()
    folder.claim(tmp_path, config(), "one")
    after = file.stat()
    assert (before.st_mtime_ns, before.st_ino) == (after.st_mtime_ns, after.st_ino)
    folder.claim(tmp_path, config("steps=8"), "one")
    assert folder.config_of(tmp_path).steps == 8


@pytest.mark.parametrize("which", ["best", "last", "4", "00000006"])
def test_a_run_is_read_back(trained: Path, which: str) -> None:
    run = folder.open_run(trained, checkpoint=which)
    names = {"last": "step-00000006", "4": "step-00000004", "00000006": "step-00000006"}
    best = checkpoint.found(trained / "checkpoints", "best")[-1].name
    stored = checkpoint.read(trained / "checkpoints" / names.get(which, best))
    assert run.step == stored.step
    assert run.config == config()
    assert not run.model.training
    for name, parameter in run.model.named_parameters():
        assert torch.equal(parameter, stored.groups["model"][name])
    assert run.corpus.digest == json.loads((trained / "run.json").read_text())["data"]


def test_a_run_and_its_checkpoints_are_directories_of_transformers(trained: Path) -> None:
    places = [trained, *sorted((trained / "checkpoints").iterdir())]
    assert {one.name for one in places} >= {"run", "step-00000006"}
    ids = torch.arange(12).view(2, 6)
    for place in places:
        which = "best" if place == trained else place.name.partition("-")[2]
        model = AutoModelForCausalLM.from_pretrained(place)
        run = folder.open_run(trained, checkpoint=which)
        with torch.no_grad():
            assert torch.equal(model(ids).logits, run.model(ids).logits)
        text = "w3 w1\nw2"
        assert AutoTokenizer.from_pretrained(place)(text)["input_ids"] == [
            run.corpus.vocabulary.eos, *run.corpus.vocabulary.encode(text, end=False)
        ]  # fmt: skip
    # A line's end is no end of a text.
    assert model.generation_config.eos_token_id is None
    assert model.generate(max_new_tokens=20).shape == (1, 21)


def test_what_a_kill_before_publishing_left_is_made_good(trained: Path, tmp_path: Path) -> None:
    again = tmp_path / "run"
    shutil.copytree(trained, again)
    (again / "model.safetensors").write_bytes(b"of an earlier best")
    (again / "tokenizer.json").unlink()
    (again / ".published.model.safetensors").write_bytes(b"half")
    text = trained.parent / "text"
    train(
        config(),
        Options(data=(text,), out=again, cache=trained.parent / "cache", device="cpu", trackers=()),
    )
    for name in ("model.safetensors", "tokenizer.json", "config.json", "generation_config.json"):
        assert (again / name).read_bytes() == (trained / name).read_bytes()
    assert not list(again.glob(".published*"))


def copied_run(trained: Path, tmp_path: Path) -> tuple[Path, Path]:
    """A run directory that may be spoiled, and its best checkpoint."""
    shutil.copytree(trained, tmp_path / "run")
    return tmp_path / "run", checkpoint.found(tmp_path / "run" / "checkpoints", "best")[-1]


def test_an_edit_of_the_published_model_leaves_the_checkpoint_alone(trained: Path, tmp_path: Path) -> None:
    run, best = copied_run(trained, tmp_path)
    for file in best.iterdir():
        (run / file.name).unlink(missing_ok=True)
    folder.publish(best)
    published = {file.name for file in best.iterdir()} - {"manifest.json"}
    for name in published:
        assert (run / name).read_bytes() == (best / name).read_bytes()
        # As config.save_pretrained does it, and versions of safetensors did: in place.
        with (run / name).open("r+b") as file:
            file.write(b"edited")
    assert checkpoint.read(best).step == int(best.name.partition("-")[2])
    folder.publish(best)
    for name in published:
        assert (run / name).read_bytes() == (best / name).read_bytes()


def test_published_links_of_earlier_versions_become_copies(trained: Path, tmp_path: Path) -> None:
    run, best = copied_run(trained, tmp_path)
    (run / "config.json").unlink()
    os.link(best / "config.json", run / "config.json")
    folder.publish(best)
    assert not (run / "config.json").samefile(best / "config.json")


def test_an_unchanged_published_model_is_not_copied_again(trained: Path, tmp_path: Path) -> None:
    run, best = copied_run(trained, tmp_path)
    folder.publish(best)
    before = {name: (run / name).stat().st_ino for name in ("config.json", "model.safetensors")}
    folder.publish(best)
    assert before == {name: (run / name).stat().st_ino for name in before}


@pytest.mark.parametrize("in_kernel", [True, False], ids=["kernel", "buffer"])
def test_a_disk_that_is_full_keeps_the_model_published_before(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_kernel: bool
) -> None:
    run, best = copied_run(trained, tmp_path)
    (run / "model.safetensors").write_bytes(b"of an earlier best")

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    if not in_kernel:
        monkeypatch.delattr(os, "copy_file_range")
        folder.publish(best)
        assert (run / "model.safetensors").read_bytes() == (best / "model.safetensors").read_bytes()
        (run / "model.safetensors").write_bytes(b"of an earlier best")
    else:
        monkeypatch.setattr(os, "copy_file_range", full)
    monkeypatch.setattr(shutil, "copyfileobj", full)
    with pytest.raises(FullrankError, match="No space left on device"):
        folder.publish(best)
    assert (run / "model.safetensors").read_bytes() == b"of an earlier best"
    assert not list(run.glob(".published*"))


def test_what_a_head_stores_beside_its_parameters_comes_back(trained: Path, tmp_path: Path) -> None:
    chosen = override(recipe("awd-lstm", "mixtape"), [*SETTINGS, "steps=2"])
    options = Options(
        data=(trained.parent / "text",), out=tmp_path / "run", cache=tmp_path, device="cpu", trackers=(),
        monitors=False,
    )  # fmt: skip
    train(chosen, options)
    model, report = AutoModelForCausalLM.from_pretrained(tmp_path / "run", output_loading_info=True)
    assert not report["missing_keys"]
    assert torch.equal(model.lm_head.order, folder.open_run(tmp_path / "run").model.lm_head.order)


@pytest.mark.parametrize("change", ["missing", "unknown", "shape"])
def test_weights_of_another_architecture(change: str) -> None:
    model = build(config(), 13)
    weights = {name: one.detach().clone() for name, one in model.named_parameters()}
    name = sorted(weights)[2]
    if change == "missing":
        del weights[name]
    elif change == "unknown":
        weights["novel.weight"] = torch.ones(1)
    else:
        weights[name] = torch.ones(1, 1, 1)
    before = {name: one.detach().clone() for name, one in model.named_parameters()}
    with pytest.raises(FullrankError, match="another architecture"):
        folder.restore(model, weights, Path("x"))
    assert all(torch.equal(one, before[name]) for name, one in model.named_parameters())


def test_what_is_no_run_or_not_whole(trained: Path, tmp_path: Path) -> None:
    with pytest.raises(FullrankError, match="is no run directory"):
        folder.open_run(tmp_path)
    with pytest.raises(FullrankError, match="keeps no checkpoint '5': expected best, last or one of 2, 4, 6"):
        folder.open_run(trained, checkpoint="5")
    folder.claim(tmp_path, config(), "x")
    with pytest.raises(FullrankError, match="no checkpoint yet"):
        folder.open_run(tmp_path)
    shutil.copytree(trained / "checkpoints", tmp_path / "checkpoints")
    with pytest.raises(FullrankError, match="lost its tokens"):
        folder.open_run(tmp_path)


def test_tokens_are_those_of_the_runs_data(trained: Path, tmp_path: Path) -> None:
    # A run that was begun on other data before its first checkpoint has both.
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    own = folder.open_run(run).corpus.digest
    for seed in range(1, 5):
        other = data.prepare(
            [texts(tmp_path / str(seed), seed)], DataConfig(vocabulary_from="all"), tmp_path / "cache"
        )
        folder.link_tokens(other.folder, run / "tokens")
    assert folder.open_run(run).corpus.digest == own


def test_flat() -> None:
    flat = folder.flat(to_json(config()))
    assert flat["optimiser.lr"] == 0.02
    assert flat["steps"] == 6
    assert not any(isinstance(value, dict) for value in flat.values())
