"""The study of normalisers on a toy text: what is kept, what is measured, and what is refused."""

from __future__ import annotations

import dataclasses
import json
import random
import shutil
import signal
from pathlib import Path

import pytest
import torch

from fullrank import results
from fullrank.cli.main import run as command
from fullrank.errors import FullrankError
from fullrank.results import AttentionStudy
from fullrank.studies import attention
from fullrank.train.learner import Learner
from fullrank.train.loop import Outcome

SMALL = (
    "data.level=bytes", "body.hidden=16", "body.rate_width=16", "body.heads=2", "body.inner=16",
    "body.layers=1", "length=12", "batch=4", "final_tokens=256", "evaluate_tokens=128", "optimiser.lr=0.05",
)  # fmt: skip
CONFIG = attention.Config(normalisers=("softmax", "sparsemax", "sink"), seeds=(0, 1), steps=6, changes=SMALL)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("normalisers")
    draw = random.Random(0)
    for split, lines in (("train", 200), ("valid", 60), ("test", 60)):
        words = [" ".join(draw.choices(["ab", "cd", "efg"], k=6)) for _ in range(lines)]
        (folder / "text").mkdir(exist_ok=True)
        (folder / "text" / f"{split}.txt").write_text("\n".join(words) + "\n")
    return folder


def studied(place: Path, config: attention.Config = CONFIG, out: str = "study") -> AttentionStudy:
    return attention.run(
        (place / "text",), place / out, config, cache=place / "cache" / "tokens", device="cpu"
    )


@pytest.fixture(scope="module")
def record(place: Path) -> AttentionStudy:
    return studied(place)


def test_every_normaliser_and_seed_has_its_run(record: AttentionStudy) -> None:
    found = [(run.normaliser, run.seed) for run in record.runs]
    assert found == [(name, seed) for name in CONFIG.normalisers for seed in (0, 1)]
    assert all(run.steps == (2, 4, 6) and not run.failure for run in record.runs)
    assert len({run.valid.value for run in record.runs if run.valid is not None}) == 6
    assert record.training_tokens == 6 * 4 * 12
    assert (record.context, record.vocabulary) == (12, 257)
    assert "body.normaliser" not in record.config
    assert record.config["body.hidden"] == "16"
    sizes = {run.normaliser: run.parameters for run in record.runs}
    assert sizes["sink"] == sizes["softmax"] + 2 == sizes["sparsemax"] + 2
    rows = {row.normaliser: row for row in record.compared()}
    assert rows["softmax"].difference is None
    assert rows["sink"].difference is not None


def test_measures_know_the_normalisers_apart(record: AttentionStudy) -> None:
    by_name = {name: [run.layers[0] for run in record.of(name)] for name in record.names()}
    for one in by_name["softmax"]:
        assert one.mass == pytest.approx(1.0, abs=1e-5)
        assert one.zeros == 0.0
        assert 1 < one.effective_tokens < 12
        assert 0 < one.first_mass < 1
    for one in by_name["sparsemax"]:
        assert one.mass == pytest.approx(1.0, abs=1e-5)
        assert 0 < one.zeros < 1
    for one in by_name["sink"]:
        assert 0 < one.mass < 0.99
        assert len(one.learnt) == 2
        # It starts at zero, and training has moved it.
        assert all(value != 0 for value in one.learnt)
    assert all(0 <= one.separable_random <= one.separable <= 1 for some in by_name.values() for one in some)


def test_measures_of_uniform_attention_are_exact(place: Path, record: AttentionStudy) -> None:
    run = attention.open_run(place / "study" / "runs" / "softmax-seed0")
    for layer in run.model.model.layers:
        torch.nn.init.zeros_(layer.attention.query_key_value.weight)
        torch.nn.init.zeros_(layer.attention.query_key_value.bias)
    (layer,) = attention.measure(run)
    # Queries that see 7 to 12 positions, all alike.
    assert layer.effective_tokens == pytest.approx(9.5, rel=1e-6)
    assert layer.first_mass == pytest.approx(sum(1 / count for count in range(7, 13)) / 6, rel=1e-6)
    assert run.model.model.config._attn_implementation == "sdpa"


def test_what_is_finished_is_kept(
    place: Path, record: AttentionStudy, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = place / "study" / "runs" / "sink-seed1"
    shutil.rmtree(lost)
    # A run from before there was a setting for it.
    old = place / "study" / "runs" / "softmax-seed0" / "run.json"
    document = json.loads(old.read_text())
    del document["config"]["body"]["normaliser"]
    old.write_text(json.dumps(document))
    trained: list[str] = []
    step = Learner.step

    def counted(self: Learner, *arguments: object) -> object:
        trained.append(self.config.body.normaliser)
        return step(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Learner, "step", counted)
    again = studied(place)
    assert trained == ["sink"] * 6
    for one, two in zip(record.runs, again.runs, strict=True):
        assert (one.normaliser, one.valid, one.layers) == (two.normaliser, two.valid, two.layers)


def test_the_command_prints_a_table_and_writes_record_and_page(
    place: Path, record: AttentionStudy, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FULLRANK_CACHE", str(place / "cache"))
    monkeypatch.setenv("FULLRANK_DEBUG", "1")
    monkeypatch.setenv("COLUMNS", "160")
    settings = [word for setting in SMALL for word in ("--set", setting)]
    words = ["study", "attention", "--data", str(place / "text"), "--out", str(place / "study")]
    words += ["--normalisers", *CONFIG.normalisers, "--seeds", "0", "1", "--steps", "6", "--device", "cpu"]
    assert command([*words, *settings]) == 0
    printed = capsys.readouterr().out
    for row in record.compared():
        assert f"{row.valid:.4f}" in printed
    written, made = results.load(place / "study" / "results.json")
    assert written.compared() == record.compared()
    assert made.versions["torch"]
    assert "softmax with a sink" in (place / "study" / "report.html").read_text()


def test_a_run_whose_numbers_burst_is_a_result(place: Path) -> None:
    config = attention.Config(
        normalisers=("softmax",), seeds=(0,), steps=6,
        changes=(*SMALL, "optimiser.lr=1e9", "optimiser.clip=0", "optimiser.warmup=0"),
    )  # fmt: skip
    (run,) = studied(place, config, "burst").runs
    assert run.valid is None
    assert run.layers == ()
    assert "finite" in run.failure


def test_a_signal_stops_the_study(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stopped = Outcome(reason="stopped", step=1, steps=6, signal=int(signal.SIGTERM))
    monkeypatch.setattr(attention, "train", lambda *_: stopped)
    with pytest.raises(attention.Stopped) as caught:
        studied(place, out="stopped")
    assert caught.value.signal == signal.SIGTERM
    words = ["study", "attention", "--data", str(place / "text"), "--out", str(place / "stopped")]
    with pytest.raises(SystemExit) as code:
        command(words)
    assert code.value.code == 128 + signal.SIGTERM


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"normalisers": ("sink",)}, "softmax among them"),
        ({"normalisers": ("softmax", "softmax")}, "expected different ones"),
        ({"normalisers": ("softmax", "sigmod")}, "did you mean 'sigmoid'"),
        ({"seeds": ()}, "the seeds are none"),
        ({"seeds": (1, 1)}, "expected different ones"),
        ({"steps": 0}, "expected at least 1"),
        ({"changes": ("seed=3",)}, "is the study's own"),
    ],
)
def test_impossible_settings_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(FullrankError, match=message):
        attention.Config(**options)  # type: ignore[arg-type]


def test_bad_settings_show_before_the_first_run(place: Path) -> None:
    config = attention.Config(changes=("optimiser.lr=fast",))
    with pytest.raises(FullrankError, match="is no value of it"):
        studied(place, config, "bad")
    assert not (place / "bad").exists()


def test_a_text_shorter_than_a_window_is_refused(place: Path, record: AttentionStudy) -> None:
    run = attention.open_run(place / "study" / "runs" / "softmax-seed0")
    valid = run.corpus.splits["valid"]
    splits = {**run.corpus.splits, "valid": dataclasses.replace(valid, tokens=valid.tokens[:11])}
    short = dataclasses.replace(run, corpus=dataclasses.replace(run.corpus, splits=splits))
    with pytest.raises(FullrankError, match="expected at least 12: give more text"):
        attention.measure(short)
