"""The study of generated texts on a tiny model and tiny data: the record, the page, and that it goes on."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from fullrank import report, results
from fullrank.errors import FullrankError
from fullrank.models import loading
from fullrank.results import Generation
from fullrank.studies import generation, generation_tasks
from fullrank.studies.generation import ABLATIONS, METHODS, Config, Study
from tests.studies.test_data_to_text import write

SLOW = pytest.mark.slow(reason="trains seven output layers at two rates, ten seconds of processor time")
SMALL = Config(
    methods=(*METHODS, *ABLATIONS), seeds=(0,), judged_tokens=256, window=32,
    rates=(1e-4, 3e-4), layers=1, steps=2, batch=2, development=2, prompts=2, new_tokens=6,
    longest=96, shown=1,
)  # fmt: skip


@pytest.fixture(scope="module")
def loaded(word_model: Path) -> loading.Loaded:
    return loading.load(word_model)


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> generation_tasks.Task:
    return generation_tasks.read("restaurants", write(tmp_path_factory.mktemp("e2e")))


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kept")


@pytest.fixture(scope="module")
def record(loaded: loading.Loaded, task: generation_tasks.Task, kept: Path) -> Generation:
    return generation.run(loaded, task, SMALL, directory=kept, data="e2e")


@SLOW
def test_the_record_is_whole(record: Generation, tmp_path: Path) -> None:
    assert [one.method for one in record.methods] == [*METHODS, *ABLATIONS]
    for one in record.methods:
        assert list(one.scores) == ["slots said", "slots made up", "BLEU", "chrF", "table precision"]
        assert len(one.texts) == 1
        assert math.isfinite(one.losses[0])
        assert math.isfinite(one.ordinary[0])
        if one.method == "base":
            assert one.rate is None
            assert one.tried == {}
        else:
            assert f"{one.rate:g}" == min(one.tried, key=one.tried.__getitem__)
            assert {"0.0001", "0.0003"} <= set(one.tried)
    added = {one.method: one.added for one in record.methods}
    assert added["base"] == added["softmax"] == 0
    assert added["trime"] == added["histalign"] == 1 < added["trunk_cache"]
    losses = {one.method: one.losses for one in record.methods}
    assert losses["base"] != losses["softmax"] != losses["trime"] != losses["histalign"]
    assert record.people["slots said"] == 1.0
    # The first reference is held against the other, not against itself.
    assert 0 < record.people["chrF"] < 100
    made = results.provenance(seed=None, device="cpu")
    results.save(record, tmp_path / "results.json", made)
    assert results.load(tmp_path / "results.json")[0] == record
    assert "name: Strada" in report.render(record, made)


@SLOW
def test_what_is_done_is_not_done_again(
    loaded: loading.Loaded,
    task: generation_tasks.Task,
    record: Generation,
    kept: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lost = next(kept.rglob("histalign-seed0-*"))
    lost.unlink()
    again = generation.run(loaded, task, SMALL, directory=kept, data="e2e")
    assert _timeless(again) == _timeless(record)

    def refuse(*_: Any) -> None:
        raise AssertionError("trained again")

    monkeypatch.setattr(Study, "_train", refuse)
    assert generation.run(loaded, task, SMALL, directory=kept, data="e2e") == again
    with pytest.raises(AssertionError, match="trained again"):
        generation.run(loaded, task, dataclasses.replace(SMALL, steps=3), directory=kept, data="e2e")


@SLOW
def test_the_model_is_left_as_it_was(loaded: loading.Loaded, record: Generation, word_model: Path) -> None:
    fresh = loading.load(word_model).model.state_dict()
    for name, value in loaded.model.state_dict().items():
        assert torch.equal(value, fresh[name]), name


def test_texts_count_behind_their_prompt(
    loaded: loading.Loaded, task: generation_tasks.Task, tmp_path: Path
) -> None:
    study = Study(loaded, task, SMALL, tmp_path)
    examples = [task.train[0], task.train[1]]
    texts = study.texts.of(examples)
    for row, one in enumerate(examples):
        ids = texts.context[row][texts.context[row] >= 0]
        counted = texts.targets[row][texts.targets[row] >= 0]
        decoded = loaded.tokenizer.decode(counted)
        assert decoded == one.text[: len(decoded)]
        assert torch.equal(counted, ids[-len(counted) :])
    head = study.head("softmax", 0)
    whole = study.plain(texts.ids).logits.log_softmax(-1)
    counted = texts.targets >= 0
    expected = -whole[counted].gather(1, texts.targets[counted][:, None]).mean()
    assert study.loss(head, examples) == pytest.approx(float(expected), rel=1e-4)


@SLOW
def test_articles(loaded: loading.Loaded, tmp_path: Path) -> None:
    words = "The ship Mikasa sailed to Japan and came back to the Port again . " * 14
    for name in ("train.txt", "test.txt"):
        (tmp_path / name).write_text(f" \n = One = \n {words}\n = Two = \n {words}\n", encoding="utf8")
    task = generation_tasks.read("articles", tmp_path, judge=loaded)
    config = dataclasses.replace(SMALL, methods=("base", "trime"), rates=(1e-4,))
    found = generation.run(loaded, task, config, directory=tmp_path / "kept", data="w", judge="itself")
    assert found.methods[1].rate == 1e-4
    assert list(found.methods[1].tried) == ["0.0001"]
    names = {"telling words back", "rep-2", "rep-4", "distinct-2", "judge's loss"}
    assert all(set(one.scores) == names for one in found.methods)
    assert found.people["rep-4"] > 0.5
    pieces = task.marked(0, "It met Mikasa and Yamato, a ship.")
    assert [(one.text, one.kind) for one in pieces] == [
        ("It met ", "plain"), ("Mikasa", "copied"), (" and ", "plain"), ("Yamato", "invented"),
        (", a ship.", "plain"),
    ]  # fmt: skip


def test_bad_settings(tmp_path: Path) -> None:
    with pytest.raises(FullrankError, match="expected some of base"):
        Config(methods=("tirme",))
    with pytest.raises(FullrankError, match="a rate above 0"):
        Config(rates=(0.0,))
    with pytest.raises(FullrankError, match="expected one of restaurants, articles"):
        generation_tasks.read("poems", tmp_path)


def _timeless(record: Generation) -> Generation:
    return dataclasses.replace(
        record, methods=tuple(dataclasses.replace(one, seconds=()) for one in record.methods)
    )


@pytest.mark.gpu
def test_a_gpu_finds_what_a_cpu_finds(
    word_model: Path,
    loaded: loading.Loaded,
    task: generation_tasks.Task,
    record: Generation,
    kept: Path,
    tmp_path: Path,
) -> None:
    on_gpu = generation.run(
        loading.load(word_model, device="cuda"), task, SMALL, directory=tmp_path, data="e2e"
    )
    compare_devices(record, on_gpu, Study(loaded, task, SMALL, kept))


def compare_devices(record: Generation, on_gpu: Generation, study: Study) -> None:
    """Losses at one rate agree, and the GPU's rate is as good on the CPU as the CPU's own.

    A GPU trains with products in bf16. In these two steps that moves a loss by up to 3e-4 of itself. The two
    best rates of softmax are 1.3e-4 apart in development loss: either may win. Their test losses are 2.6e-3
    apart, which the tolerance of 1e-3 tells from rounding.
    """
    for cpu, gpu in zip(record.methods, on_gpu.methods, strict=True):
        for rate in cpu.tried.keys() & gpu.tried.keys():
            assert gpu.tried[rate] == pytest.approx(cpu.tried[rate], rel=1e-3), (cpu.method, rate)
        trained = study.one(cpu.method, 0, gpu.rate)
        assert gpu.losses == pytest.approx((trained["loss"],), rel=1e-3), cpu.method
        assert gpu.ordinary == pytest.approx((trained["ordinary"],), rel=1e-3), cpu.method
        least = min(cpu.tried.values(), default=trained["development"])
        assert trained["development"] == pytest.approx(least, rel=1e-3), cpu.method
