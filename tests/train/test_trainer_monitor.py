"""The monitor in transformers' own log: the numbers of `diagnose`, and training is left alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.data.data_collator import default_data_collator

from fullrank.diagnose.monitors import MONITORS, measure
from fullrank.diagnose.questions.spectrum import spectrum
from fullrank.errors import FullrankError
from fullrank.train import FullrankMonitor
from fullrank.upgrade import upgrade
from tests.tiny_models import ids, padded, quiet_transformers, tiny_model

__all__ = ["ids", "padded", "quiet_transformers", "tiny_model"]

Make = Callable[..., Any]
WIDTH, ROWS, TIME = 32, 16, 12


@pytest.fixture
def texts() -> list[dict[str, Tensor]]:
    ids = torch.randint(2, 101, (ROWS, TIME), generator=torch.Generator().manual_seed(4))
    return [{"input_ids": row, "labels": row} for row in ids]


@pytest.fixture(autouse=True)
def quiet(capsys: pytest.CaptureFixture[str]) -> Iterator[None]:
    yield
    capsys.readouterr()


class Reporter(TrainerCallback):
    """Stands where TensorBoard and W&B stand."""

    def __init__(self) -> None:
        self.seen: list[dict[str, float]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **more: Any) -> None:
        self.seen.append(dict(logs))


def trainer(model: Any, texts: Any, folder: Path, **settings: Any) -> Trainer:
    arguments = TrainingArguments(
        **{
            "output_dir": str(folder), "use_cpu": True, "report_to": "none", "disable_tqdm": True, "seed": 5,
            "per_device_train_batch_size": 4, "max_steps": 4, "learning_rate": 0.01, "save_strategy": "no",
            "eval_strategy": "steps", "eval_steps": 2, "dataloader_pin_memory": False, **settings,
        }
    )  # fmt: skip
    sets = {"train_dataset": texts, "eval_dataset": texts, "data_collator": default_data_collator}
    return Trainer(model, arguments, callbacks=[Reporter()], **sets)


def watched(made: Trainer, **options: Any) -> list[dict[str, float]]:
    """The log of a monitored evaluation, as a tracker sees it."""
    made.add_callback(FullrankMonitor(made, **options))
    made.evaluate()
    return logged(made)


def logged(made: Trainer) -> list[dict[str, float]]:
    reporter = next(one for one in made.callback_handler.callbacks if isinstance(one, Reporter))
    return [line for line in reporter.seen if any(name.endswith("_monitor_seconds") for name in line)]


@pytest.mark.parametrize("head", ["mos", "doc", "pointer", "sigsoftmax"])
def test_a_tracker_gets_every_number_that_applies(
    head: str, tiny_model: Make, texts: Any, tmp_path: Path
) -> None:
    model = upgrade(tiny_model(), head)
    (line,) = watched(trainer(model, texts, tmp_path))
    known = {f"eval_{name}" for name in MONITORS} | {"eval_monitor_seconds", "epoch"}
    assert {name.split("/")[0] for name in line} <= known
    assert all(isinstance(value, float | int) and math.isfinite(value) for value in line.values())
    expected = spectrum(model.get_output_embeddings().weight.detach())
    assert line["eval_head_effective_rank"] == pytest.approx(expected.effective_rank)
    assert line["eval_head_singular_entropy"] == pytest.approx(expected.singular_entropy)
    if head in ("mos", "doc"):
        shares = [line[f"eval_component_shares/{k}"] for k in range(4)]
        assert sum(shares) == pytest.approx(1.0)
        assert line["eval_dead_components"] == 0
        assert 0 < line["eval_prior_entropy_share"] <= 1
        # The components are equal before training.
        assert line["eval_logprob_rank"] <= WIDTH


# A second and a half each; their output layers are like one of the first three.
SLOWER = [pytest.param(name, marks=pytest.mark.slow) for name in ("phi", "mamba", "cohere")]


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", *SLOWER])
def test_a_plain_model_is_measured_as_the_softmax_that_it_is(
    family: str, tiny_model: Make, texts: Any, tmp_path: Path
) -> None:
    model = tiny_model(family)
    made = trainer(model, texts, tmp_path)
    (line,) = watched(made)
    weight = model.get_output_embeddings().weight.detach()
    assert line["eval_head_effective_rank"] == pytest.approx(spectrum(weight).effective_rank)
    assert "eval_prior_entropy" not in line
    if family == "mamba":
        assert not any("attention" in name for name in line)
    else:
        assert 0 < line["eval_attention_sensitivity"] <= 0.5
        assert line["eval_attention_effective_tokens"] >= 1
    # A bias adds one, a soft cap bends what was straight.
    bound = {"gemma2": line["eval_logprob_rank_ceiling"], "phi": WIDTH + 1}.get(family, WIDTH)
    assert bound - 1 <= line["eval_logprob_rank"] <= bound
    with torch.no_grad():
        model.get_output_embeddings().weight[:, 1:] = 0.0
        made.evaluate()
    assert logged(made)[-1]["eval_head_effective_rank"] == pytest.approx(1.0, abs=1e-3)


def test_training_lifts_the_rank_beyond_one_softmax_in_tensorboard(
    tiny_model: Make, texts: Any, tmp_path: Path
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    torch.manual_seed(0)
    made = trainer(
        upgrade(tiny_model("llama untied"), "mos").train(), texts, tmp_path, report_to="tensorboard"
    )
    made.add_callback(FullrankMonitor(made))
    made.train()
    (line, last) = logged(made)
    assert last["eval_logprob_rank"] > WIDTH
    assert [line["step"] for line in made.state.log_history if "eval_logprob_rank" in line] == [2, 4]
    (events,) = tmp_path.rglob("events.out.tfevents.*")
    board = EventAccumulator(str(events)).Reload()
    ranks = [(event.step, event.value) for event in board.Scalars("eval/logprob_rank")]
    assert ranks == [(2, line["eval_logprob_rank"]), (4, last["eval_logprob_rank"])]


@pytest.mark.slow(reason="two trainings to compare, three seconds")
def test_the_run_ends_with_the_weights_of_one_without(tiny_model: Make, texts: Any, tmp_path: Path) -> None:
    def ended(monitored: bool, plain: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = tiny_model(attention_dropout=0.3)
        made = trainer((model if plain else upgrade(model, "mos", dropout=0.2)).train(), texts, tmp_path)
        if monitored:
            made.add_callback(FullrankMonitor(made))
        made.train()
        assert len(logged(made)) == (2 if monitored else 0)
        return [parameter.detach().clone() for parameter in made.model.parameters()]

    for plain in (True, False):
        pairs = zip(ended(False, plain), ended(True, plain), strict=True)
        assert all(torch.equal(own, other) for own, other in pairs)


@pytest.mark.parametrize("head", ["mos", "pointer"])
def test_padding_changes_nothing(head: str, tiny_model: Make, texts: Any, tmp_path: Path) -> None:
    model = upgrade(tiny_model("llama untied"), head)
    with torch.no_grad():
        for name, parameter in model.lm_head.named_parameters():
            if "decoder" not in name:
                parameter.add_(0.1)

    def longer(left: bool) -> list[dict[str, Tensor]]:
        found = []
        for number, one in enumerate(texts):
            ends = (number % 5, 0) if left else (0, number % 5)
            ids = torch.nn.functional.pad(one["input_ids"], ends, value=7)
            mask = torch.nn.functional.pad(torch.ones(TIME, dtype=torch.long), ends)
            found.append({"input_ids": ids, "attention_mask": mask, "labels": ids})
        return found

    lines = []
    for rows in (texts, longer(True), longer(False)):
        made = trainer(model, rows, tmp_path, per_device_eval_batch_size=1)
        lines.append(watched(made)[0])
    for name in set(lines[0]) - {"eval_monitor_seconds"}:
        assert lines[1][name] == lines[2][name] == lines[0][name], name


def test_unseen_positions_are_not_measured(tiny_model: Make, texts: Any) -> None:
    """What stands where nothing is seen, however far out, moves no number."""
    for head in ("mos", "pointer"):
        model = upgrade(tiny_model(), head)
        ids = torch.stack([one["input_ids"] for one in texts])
        seen = torch.arange(TIME) < torch.arange(3, 3 + ROWS)[:, None].clamp(max=TIME)
        with torch.no_grad():
            states, context, _ = model.head_inputs(ids, seen.long())
        ids = ids if context is None else context
        expected = measure(model.lm_head, states, ids, seen=seen)
        states[0][~seen] = 1e4
        assert measure(model.lm_head, states, ids, seen=seen) == expected


def test_several_sets_and_every_other_evaluation(tiny_model: Make, texts: Any, tmp_path: Path) -> None:
    made = trainer(upgrade(tiny_model(), "mos"), texts, tmp_path)
    made.eval_dataset = {"one": texts[:8], "two": texts[8:]}
    made.add_callback(FullrankMonitor(made, every=2))
    for _ in range(3):
        made.evaluate()
    lines = logged(made)
    assert ["eval_one_anisotropy" in line for line in lines] == [True, False] * 2
    assert ["eval_two_anisotropy" in line for line in lines] == [False, True] * 2
    assert lines[0]["eval_one_anisotropy"] != lines[1]["eval_two_anisotropy"]


def test_streams_are_read_from_the_start(tiny_model: Make, texts: Any, tmp_path: Path) -> None:
    class Stream(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            return iter(texts)

    made = trainer(upgrade(tiny_model(), "mos"), texts, tmp_path)
    made.eval_dataset = Stream()
    assert watched(made, contexts=20)[0]["eval_logprob_rank_ceiling"] == 20


def test_a_model_that_cannot_be_measured_trains_on(
    tiny_model: Make, texts: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = trainer(
        upgrade(tiny_model(), "mos"), [{**one, "input_ids": one["input_ids"][:1]} for one in texts], tmp_path
    )
    made.eval_dataset = [{"input_ids": one["input_ids"][:1], "labels": one["labels"][:1]} for one in texts]
    assert watched(made) == []
    made.evaluate()
    assert [record.message for record in caplog.records if "measured" in record.message] == [
        "nothing could be measured at step 0: the evaluation set has fewer than 3 tokens to measure on"
    ]


def test_settings_that_are_impossible() -> None:
    with pytest.raises(FullrankError, match="every >= 1"):
        FullrankMonitor(None, every=0)
