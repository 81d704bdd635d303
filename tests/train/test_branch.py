"""Runs that begin where another one stands."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fullrank.cli.main import run as command
from fullrank.errors import FullrankError
from fullrank.train import branch, checkpoint, folder
from fullrank.train.config import override

SETTINGS = [
    "body.hidden=8", "body.last=6", "head.width=4", "head.components=3", "batch=4", "length=5", "steps=8",
    "evaluate_every=4", "checkpoint_every=4", "keep=9", "snapshot_every=4", "optimiser.lr=0.02",
    "optimiser.schedule=wsd", "optimiser.warmup=0.125", "optimiser.decay=0.125", "evaluate_batch=3",
]  # fmt: skip


def sets(*settings: str) -> list[str]:
    return [word for setting in settings for word in ("--set", setting)]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("branch")
    (path / "text").mkdir()
    generator = torch.Generator().manual_seed(0)
    for split, lines in (("train", 40), ("valid", 8), ("test", 8)):
        words = torch.randint(0, 12, (lines, 9), generator=generator).tolist()
        (path / "text" / f"{split}.txt").write_text(
            "".join(" ".join(f"w{word}" for word in row) + "\n" for row in words)
        )
    always = ["--device", "cpu", "--track", "none", "--no-monitors"]
    trained = ["train", "awd-lstm", "--data", str(path / "text"), "--out", str(path / "parent"), *always]
    assert command([*trained, *sets(*SETTINGS)]) == 0
    return path


@pytest.fixture
def started(place: Path, tmp_path: Path) -> Callable[..., Path]:
    """started(RUN@STEP, words ...): a run from there in a directory of its own."""

    def run(where: str, *words: str, out: str = "child") -> Path:
        always = ["--device", "cpu", "--track", "none", "--no-monitors", "--out", str(tmp_path / out)]
        assert command(["train", "--from", str(place / where), *always, *words]) == 0
        return tmp_path / out

    return run


def weights(run: Path, step: int) -> dict[str, Any]:
    return checkpoint.read(checkpoint.path_of(run / folder.CHECKPOINTS, "step", step)).groups["model"]


def test_a_branch_with_the_same_settings_is_the_run_itself(place: Path, started: Callable[..., Path]) -> None:
    """From a checkpoint: to the last bit, the optimiser and the place in the data among it."""
    child = started("parent@4")
    theirs, ours = weights(place / "parent", 8), weights(child, 8)
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(theirs[name], ours[name]) for name in theirs)
    document = json.loads((child / folder.CONFIG).read_text())
    assert document["from"] == {"run": "parent", "step": 4}
    start = json.loads((child / folder.LOG).read_text().splitlines()[0])
    assert start["from"] == {"run": "parent", "step": 4}


def test_another_rate_or_horizon_goes_on_from_there(place: Path, started: Callable[..., Path]) -> None:
    child = started("parent@4", *sets("optimiser.lr=0.2", "steps=12"))
    assert checkpoint.step_of(checkpoint.found(child / folder.CHECKPOINTS, "step")[-1]) == 12
    theirs, ours = weights(place / "parent", 8), weights(child, 8)
    assert any(not torch.equal(theirs[name], ours[name]) for name in theirs)


def test_a_budget_of_seconds_begins_with_the_branch(started: Callable[..., Path]) -> None:
    child = started("parent@4", *sets("budget=seconds=2", "steps=0", "evaluate_every=50"))
    end = json.loads((child / folder.LOG).read_text().splitlines()[-1])
    assert end["reason"] == "finished"
    # At least the steps from which a pace is known; on no machine more than a step short of the seconds.
    assert end["step"] >= 4 + 8 + 24
    assert end["seconds"] > 1.5


@pytest.mark.parametrize("head", ["mos", "trunk", "doc"])
@pytest.mark.parametrize("where", ["parent@4", "parent@2"], ids=["checkpoint", "snapshot"])
def test_another_head_begins_with_the_same_distribution(place: Path, head: str, where: str) -> None:
    parent = branch.parent_of(str(place / where))
    config = override(parent.config, [f"head.name={head}"])
    corpus = folder.corpus_of(place / "parent")
    begun = branch.begun(parent, config, corpus.vocabulary.size, corpus.digest)
    from fullrank.train.model import build

    before, after = (build(one, corpus.vocabulary.size).eval() for one in (parent.config, config))
    folder.restore(before, parent.stored.groups["model"], parent.path)
    folder.restore(after, begun.groups["model"], parent.path)
    ids = torch.from_numpy(corpus.splits["test"].tokens[:40].astype("int64"))[None]
    with torch.no_grad():
        torch.testing.assert_close(after(ids).logits, before(ids).logits, rtol=1e-5, atol=1e-5)
    assert begun.step == int(where.rpartition("@")[2])
    assert any("contexts" in name for name in begun.groups["model"])


def test_an_untied_head_begins_with_the_embedding_as_its_matrix(
    place: Path, started: Callable[..., Path]
) -> None:
    """The same distribution at first, and the optimiser of all others; then the two part."""
    from fullrank.train.model import build

    parent = branch.parent_of(str(place / "parent@4"))
    corpus = folder.corpus_of(place / "parent")
    untied = ["head.tie=false", "body.embedding=4"]
    config = override(parent.config, untied)
    begun = branch.begun(parent, config, corpus.vocabulary.size, corpus.digest)
    before, after = (build(one, corpus.vocabulary.size).eval() for one in (parent.config, config))
    folder.restore(before, parent.stored.groups["model"], parent.path)
    folder.restore(after, begun.groups["model"], parent.path)
    ids = torch.from_numpy(corpus.splits["test"].tokens[:40].astype("int64"))[None]
    with torch.no_grad():
        torch.testing.assert_close(after(ids).logits, before(ids).logits, rtol=0, atol=0)
    assert begun.groups["optimiser"].keys() == parent.stored.groups["optimiser"].keys()
    trained = weights(started("parent@4", *sets(*untied)), 8)
    assert not torch.equal(trained["lm_head.decoder.weight"], trained["model.embedding.weight"])


def test_a_trained_matrix_is_not_tied_away(place: Path, started: Callable[..., Path]) -> None:
    child = started("parent@4", *sets("head.tie=false", "body.embedding=4"))
    parent = branch.parent_of(str(child))
    corpus = folder.corpus_of(child)
    with pytest.raises(FullrankError, match=r"leave head\.tie=false"):
        branch.begun(
            parent, override(parent.config, ["head.tie=true"]), corpus.vocabulary.size, corpus.digest
        )


def test_from_a_snapshot_the_rate_rises_once_more(started: Callable[..., Path]) -> None:
    """There is no optimiser to take over, and Adam's first steps are as long as the rate."""

    def rates(run: Path) -> list[float]:
        lines = [json.loads(line) for line in (run / folder.LOG).read_text().splitlines()]
        return [line["lr"] for line in lines if line["event"] == "train"]

    settings = sets("steps=10", "optimiser.beta2=0.5", "optimiser.schedule=constant", "evaluate_every=1")
    assert rates(started("parent@2", *settings, out="snapshot")) == pytest.approx(
        [0.02 * share for share in (1 / 4, 2 / 4, 3 / 4, 1, 1, 1, 1, 1)]
    )
    assert rates(started("parent@4", *settings, out="checkpoint")) == pytest.approx([0.02] * 6)


def test_from_the_best_model(place: Path, started: Callable[..., Path]) -> None:
    """Whose checkpoint has its weights and its loss alone."""
    best = folder.chosen(place / "parent", "best")
    child = started("parent@best", *sets(f"steps={best.step + 4}", "evaluate_every=2"))
    start = json.loads((child / folder.LOG).read_text().splitlines()[0])
    assert start["from"] == {"run": "parent", "step": best.step}
    assert weights(child, best.step + 4).keys() == best.groups["model"].keys()


def test_it_trains_and_continues_under_another_head(place: Path, started: Callable[..., Path]) -> None:
    child = started("parent@4", "--head", "mos")
    assert json.loads((child / "config.json").read_text())["head"]["name"] == "mos"
    again = started("parent@4", "--head", "mos", *sets("steps=10"))
    assert checkpoint.step_of(checkpoint.found(again / folder.CHECKPOINTS, "step")[-1]) == 10


def test_other_data_are_read_from_their_beginning(place: Path, started: Callable[..., Path]) -> None:
    other = place / "other"
    shutil.copytree(place / "text", other, dirs_exist_ok=True)
    lines = (other / "train.txt").read_text().splitlines()
    (other / "train.txt").write_text("\n".join(reversed(lines)) + "\n")
    child = started("parent@4", "--data", str(other))
    stored = checkpoint.read(checkpoint.found(child / folder.CHECKPOINTS, "step")[0])
    assert stored.step == 8
    assert stored.state["cursor"]["step_in_epoch"] == 4


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--from", "nowhere"], "is no run directory"),
        (["--from", "{parent}@3"], "keeps no checkpoint '3': expected best, last or one of 0, 1, 2, 4, 8"),
        (["--from", "{parent}", "awd-lstm"], "both a recipe and --from were given"),
        ([], "no recipe was given: expected one of"),
        (["--from", "{parent}", "--set", "body.hidden=12"], "must have its body"),
        (["--from", "{parent}", "--set", "head.tie=false"], "add --set body.embedding=4"),
        (["--from", "{parent}", "--set", "seed=1", "--head", "moos"], "moos"),
    ],
)
def test_mistakes_are_one_sentence(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    named = [word.replace("{parent}", str(place / "parent")) for word in words]
    assert command(["train", *named, "--out", str(tmp_path / "out"), "--device", "cpu"]) == 2
    found = capsys.readouterr().err
    assert said in found
    assert "Traceback" not in found
    assert not (tmp_path / "out" / folder.CONFIG).exists()


def test_a_tied_head_of_another_width_is_refused(place: Path) -> None:
    parent = branch.parent_of(str(place / "parent"))
    corpus = folder.corpus_of(place / "parent")
    config = override(parent.config, ["head.width=5"])
    with pytest.raises(FullrankError, match=r"leave body.\* and head.width as they were"):
        branch.begun(parent, config, corpus.vocabulary.size, corpus.digest)
