"""The study on a tiny model: the record's figures, what is trained, and that a stopped study goes on."""

import copy
import dataclasses
import math
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from fullrank import report, results
from fullrank.errors import FullrankError
from fullrank.heads import CacheHead
from fullrank.heads.softmax import Softmax
from fullrank.models import loading
from fullrank.results import Templates
from fullrank.studies import histalign, histalign_setting, histalign_training
from fullrank.studies.histalign_setting import ABLATIONS, METHODS, Config, Study, losses_by_rate
from fullrank.studies.template_task import Batch
from fullrank.studies.upper_training import DivergedError

SLOW = pytest.mark.slow(reason="trains ten methods at two rates, or reads states of a model, seconds each")
SMALL = Config(
    methods=(*METHODS, *ABLATIONS), seeds=(0,), rates=(1e-4, 3e-4),
    layers=1, train=12, held_out=6, epochs=1, batch=8, text_tokens=32, judged_tokens=256,
    window=64, stories=2, components=2, rank_contexts=96, rank_tokens=128,
)  # fmt: skip


@pytest.fixture(scope="module")
def loaded(word_model: Path) -> loading.Loaded:
    return loading.load(word_model)


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kept")


@pytest.fixture(scope="module")
def record(loaded: loading.Loaded, kept: Path) -> Templates:
    return histalign.run(loaded, [], SMALL, directory=kept)


@SLOW
def test_the_record_is_whole(record: Templates, tmp_path: Path) -> None:
    assert [one.method for one in record.methods] == [*METHODS, *ABLATIONS]
    for method in record.methods:
        assert {(one.split, one.scores) for one in method.accuracies} == {
            (split, scores)
            for split in ("train", "one overlap", "no overlap")
            for scores in ("full", "memory")
        }
        for one in method.accuracies:
            assert one.prompts == (12 if one.split == "train" else 6)
            shares = [one.top[k] for k in ("2", "5", "10", "25")]
            assert shares == sorted(shares)
            if one.scores == "memory":
                # Both answers stand in the prompt, which has fewer than 25 distinct tokens.
                assert one.top["25"] == (1.0,)
        assert sum(one.count for one in method.losses[1:]) > 2 * 100
        assert all(one.count > 0 for one in method.losses)
    made = results.provenance(seed=None, device="cpu")
    results.save(record, tmp_path / "results.json", made)
    assert results.load(tmp_path / "results.json")[0] == record
    assert "HistAlign" in report.render(record, made)
    check_methods(record)


def check_methods(record: Templates) -> None:
    """Only base is untouched, every method has its best rate, and no softmax has more rank than its width."""
    base, cache, *trained = record.methods
    assert base.last_loss == cache.last_loss == ()
    assert cache.memory_weight == (record.memory_start,)
    assert all(loss.change.value == 0.0 for loss in base.losses)
    for method in (base, cache):
        assert (method.rate, method.tried) == (None, {})
    for method in trained:
        assert all(loss.change.value != 0.0 for loss in method.losses)
        assert len(method.last_loss) == 1
        assert {"0.0001", "0.0003"} <= set(method.tried)
        assert f"{method.rate:g}" == min(method.tried, key=method.tried.__getitem__)
    by_name = {method.method: method for method in record.methods}
    added = {name: method.added for name, method in by_name.items()}
    assert added["base"] == added["softmax"] == 0
    assert added["cache"] == added["trime"] == added["histalign"] == 1
    # K H D + K D + K H.
    assert added["mos"] == 2 * 32 * 32 + 2 * 32 + 2 * 32
    for name in ("base", "softmax"):
        assert max(by_name[name].least_rank) <= 32
    for name in ("cache", "trime", "histalign", "histalign_sum"):
        assert min(by_name[name].least_rank) > 32


def test_a_grid_of_rates_grows_where_its_end_is_best() -> None:
    asked: list[float] = []

    def loss(best: float, rate: float) -> float:
        asked.append(rate)
        return abs(math.log(rate / best))

    assert (
        min(losses_by_rate((1.0, 3.0), lambda rate: loss(9.0, rate)), key=lambda rate: loss(9.0, rate)) == 9.0
    )
    assert sorted(losses_by_rate((1.0, 3.0), lambda rate: loss(1 / 3, rate))) == pytest.approx(
        [1 / 9, 1 / 3, 1, 3]
    )
    # Within the grid, and where there is no grid, nothing is added.
    assert list(losses_by_rate((1.0, 2.0, 4.0), lambda rate: loss(2.0, rate))) == [1.0, 2.0, 4.0]
    assert list(losses_by_rate((1.0,), lambda rate: loss(9.0, rate))) == [1.0]


def test_a_rate_that_diverges_is_no_best_one() -> None:
    def loss(least: float, rate: float) -> float:
        if rate > least:
            raise DivergedError("trime", rate)
        return -rate

    assert list(losses_by_rate((1.0, 3.0, 9.0), lambda rate: loss(3.0, rate))) == [1.0, 3.0]
    # Beyond the grid too, on either side.
    assert list(losses_by_rate((1.0, 3.0), lambda rate: loss(9.0, rate))) == [1.0, 3.0, 9.0]
    assert list(losses_by_rate((1.0, 3.0), lambda rate: loss(0.4, rate))) == pytest.approx([1 / 3, 1 / 9])
    with pytest.raises(DivergedError, match=r"rate 1 diverged: choose smaller --rates"):
        losses_by_rate((1.0,), lambda rate: loss(0.1, rate))


def test_a_prompt_that_is_not_credited_only_weighs_against_its_answer() -> None:
    torch.manual_seed(0)
    head = CacheHead(Softmax(hidden=4, vocab=9)).double()
    ids = torch.tensor([[0, 3, 5, 3, 2], [7, 0, 0, 1, 4]])
    states, answers = torch.randn(2, 5, 4, dtype=torch.float64), torch.tensor([3, 0])
    targets = torch.full_like(ids, -100)
    targets[:, -1] = answers
    found = head(states, targets, context=histalign_training._uncredited(ids, answers))
    scores = (states[:, -1] @ head.decoder.weight.T).exp()
    memory = (states[:, :-1] @ states[:, -1, :, None] / 2).exp().sum((1, 2))
    expected = -(scores[[0, 1], answers] / (scores.sum(1) + memory)).log().mean()
    torch.testing.assert_close(found, expected)
    assert found.detach() > head(states, targets, context=ids).detach()


@SLOW
def test_the_model_is_left_as_it_was(loaded: loading.Loaded, record: Templates, word_model: Path) -> None:
    fresh = loading.load(word_model).model.state_dict()
    for name, value in loaded.model.state_dict().items():
        assert torch.equal(value, fresh[name]), name
    assert not any(parameter.requires_grad for parameter in loaded.model.parameters())


@SLOW
def test_what_is_done_is_not_done_again(
    loaded: loading.Loaded, record: Templates, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("trained again")

    lost = next(kept.rglob("histalign-seed0-0.0001.safetensors"))
    lost.unlink()
    again = histalign.run(loaded, [], SMALL, directory=kept)
    # But for the time it took, a training that begins anew ends with the same numbers.
    assert _timeless(again) == _timeless(record)
    monkeypatch.setattr(histalign_training, "_train", refuse)
    assert histalign.run(loaded, [], SMALL, directory=kept) == again
    with pytest.raises(AssertionError, match="trained again"):
        histalign.run(loaded, [], dataclasses.replace(SMALL, epochs=2), directory=kept)


@SLOW
def test_as_published_the_weight_stays(loaded: loading.Loaded, tmp_path: Path) -> None:
    config = dataclasses.replace(SMALL, as_published=True, methods=("base", "histalign"))
    found = histalign.run(loaded, [], config, directory=tmp_path)
    assert found.methods[1].memory_weight == (0.0,)
    assert found.temperature == pytest.approx(32**0.5)


@SLOW
def test_answers_at_one_position_are_those_of_the_whole_head(loaded: loading.Loaded, tmp_path: Path) -> None:
    study = Study(loaded, [], SMALL, tmp_path)
    study.prepare(lambda share: None)
    head = study.head("trime", 0)
    ids = study.judged_ids[:2, :12]
    states = study.upper.states(ids, study.upper.record(ids)).detach()
    whole = head(states, context=ids)
    torch.testing.assert_close(histalign_training.answer_log_probs(head, states, ids), whole[:, -1])


@SLOW
@torch.no_grad()
def test_a_memory_starts_where_prompts_and_text_cost_least(loaded: loading.Loaded, tmp_path: Path) -> None:
    study = Study(loaded, [], SMALL, tmp_path)
    study.prepare(lambda share: None)
    ids = study.training_ids[:32]
    states = study.upper.states(ids, study.training[:32])[:, :-1]
    batches = study.prompts(SMALL.seeds[0], lambda share: None)["train"]

    def answered(head: CacheHead, batch: Batch, which: int) -> torch.Tensor:
        targets = torch.full_like(batch.ids, -100)
        targets[:, -1] = batch.pieces[:, which, 0]
        read = study.upper.states(batch.ids, batch.recorded)
        return head(read, targets, context=batch.ids, reduction="none")[:, -1]

    def loss(head: CacheHead) -> float:
        prompts = torch.cat([answered(head, batch, which) for batch in batches for which in (0, 1)])
        return float(prompts.mean() + head(states, ids[:, 1:], context=ids[:, :-1]))

    begun = loss(cast(CacheHead, study.head("trime", 0)))
    for weight in (-100.0, study.memory[False].weight - 4, study.memory[False].weight + 4):
        other = dataclasses.replace(study.memory[False], weight=weight)
        assert begun <= loss(other.head(study.head("softmax", 0))) + 1e-4


def _copies(*, copied: bool) -> histalign_setting.Trained:
    """States whose next token stood behind the same state before, or never does."""
    torch.manual_seed(1)
    states = 4 * torch.randn(4, 6, 16).repeat(1, 2, 1)
    context = torch.randint(0, 25, (4, 6)).repeat(1, 2)
    targets = context.roll(-1, 1) + (0 if copied else 25)
    return histalign_setting.Trained(states=states, context=context, targets=targets)


@torch.no_grad()
def test_prompts_that_want_a_memory_open_one_that_text_would_close() -> None:
    head = Softmax(hidden=16, vocab=50)
    text, prompts = _copies(copied=False), _copies(copied=True)
    closed = histalign_setting.memory_start(head, [text]).head(head)
    opened = histalign_setting.memory_start(head, [prompts, text]).head(head)

    def loss(cache: CacheHead, part: histalign_setting.Trained) -> float:
        return float(cache(part.states, part.targets, context=part.context))

    assert loss(opened, prompts) < loss(closed, prompts) - 0.1
    assert loss(opened, prompts) + loss(opened, text) < loss(closed, prompts) + loss(closed, text)


@torch.no_grad()
@pytest.mark.parametrize("cosine", [False, True])
def test_a_memory_that_only_costs_is_open_all_the_same(cosine: bool) -> None:
    torch.manual_seed(0)
    head = Softmax(hidden=16, vocab=50)
    states = torch.randn(4, 12, 16)
    context = torch.randint(0, 25, (4, 12))
    targets = context + 25
    trained = histalign_setting.Trained(states=states, context=context, targets=targets)
    start = histalign_setting.memory_start(head, [trained], cosine=cosine)
    cache = start.head(head)
    lost = cache(states, targets, context=context, reduction="none") - head(states, targets, reduction="none")
    share = float((1 - (-lost).exp()).mean())
    assert histalign_setting.OPEN <= share < 0.1


@SLOW
def test_trainings_are_kept_with_the_memory_that_they_began_with(
    loaded: loading.Loaded, tmp_path: Path
) -> None:
    study = Study(loaded, [], SMALL, tmp_path)
    study.prepare(lambda share: None)
    other = {**study.memory, False: dataclasses.replace(study.memory[False], weight=-77.0)}

    def name(memory: dict[bool, histalign_setting.MemoryStart], method: str) -> str:
        return histalign_setting.kept_as(study.of, method, histalign_setting.start_of(memory, method))

    for method, alike in (("trime", False), ("softmax", True), ("histalign_cosine", True)):
        assert (name(study.memory, method) == name(other, method)) is alike


@SLOW
def test_few_prompts_and_little_text_to_judge(loaded: loading.Loaded, tmp_path: Path) -> None:
    small = dataclasses.replace(SMALL, train=4, epochs=1, judged_tokens=4 * SMALL.window)
    study = Study(loaded, [], small, tmp_path)
    assert len(study.judged_ids) == 4
    assert len(study.training_ids) > 0


def test_bad_settings() -> None:
    with pytest.raises(FullrankError, match="expected base"):
        Config(methods=("trime",))
    with pytest.raises(FullrankError, match="expected a seed"):
        Config(seeds=())


@SLOW
def test_too_little_text(loaded: loading.Loaded, tmp_path: Path) -> None:
    short = tmp_path / "short.txt"
    short.write_text("A few words, again and again. " * 40)
    with pytest.raises(FullrankError, match="give more --text"):
        Study(loaded, [short], dataclasses.replace(SMALL, judged_tokens=4096), tmp_path)


def _timeless(record: Templates) -> Templates:
    methods = tuple(dataclasses.replace(one, seconds=()) for one in copy.copy(record.methods))
    return dataclasses.replace(record, methods=methods)


@pytest.mark.gpu
def test_a_gpu_finds_what_a_cpu_finds(word_model: Path, record: Templates, tmp_path: Path) -> None:
    there = histalign.run(loading.load(word_model, device="cuda"), [], SMALL, directory=tmp_path)
    for one, other in zip(record.methods, there.methods, strict=True):
        for mine, its in zip(one.losses, other.losses, strict=True):
            assert mine.by_seed == pytest.approx(its.by_seed, rel=1e-2)
        assert one.least_rank == pytest.approx(other.least_rank, abs=2)
