"""transformers' own Trainer on an upgraded model: losses, accumulation, evaluation, resuming."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import Trainer, TrainingArguments

from fullrank.upgrade import upgrade

Make = Callable[..., Any]
Example = dict[str, Tensor]
LENGTHS = (11, 4, 7, 9, 5, 10, 6, 8)


@pytest.fixture
def texts() -> list[Example]:
    """Texts of different lengths, some tokens of which do not count."""
    generator = torch.Generator().manual_seed(4)
    found = []
    for number, length in enumerate(LENGTHS):
        ids = torch.randint(2, 101, (length,), generator=generator)
        labels = ids.clone()
        labels[: number % 3] = -100
        found.append({"input_ids": ids, "labels": labels})
    return found


def padded_batch(examples: list[Example]) -> Example:
    """Padded on the right to the longest of the batch."""
    longest = max(len(one["input_ids"]) for one in examples)

    def stack(name: str, fill: int) -> Tensor:
        return torch.stack(
            [
                torch.nn.functional.pad(one[name], (0, longest - len(one[name])), value=fill)
                for one in examples
            ]
        )

    mask = torch.stack([torch.arange(longest) < len(one["input_ids"]) for one in examples]).long()
    return {"input_ids": stack("input_ids", 0), "labels": stack("labels", -100), "attention_mask": mask}


def trainer(model: Any, texts: list[Example], folder: Path, **settings: Any) -> Trainer:
    metrics = settings.pop("compute_metrics", None)
    arguments = TrainingArguments(
        **{
            "output_dir": str(folder), "use_cpu": True, "report_to": "none", "disable_tqdm": True,
            "per_device_train_batch_size": 2, "per_device_eval_batch_size": 3, "max_steps": 4, "seed": 5,
            "learning_rate": 0.01, "lr_scheduler_type": "constant", "logging_steps": 1,
            "optim": "adamw_torch", "save_strategy": "no", "dataloader_pin_memory": False,
            "train_sampling_strategy": "sequential",
            **settings,
        }
    )  # fmt: skip
    return Trainer(
        model,
        arguments,
        train_dataset=texts,
        eval_dataset=texts,
        data_collator=padded_batch,
        compute_metrics=metrics,
    )


def losses(done: Trainer) -> list[float]:
    return [line["loss"] for line in done.state.log_history if "loss" in line]


def same_weights(model: Any, other: Any, **tolerance: float) -> None:
    for (name, own), theirs in zip(model.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(own, theirs, msg=lambda text, name=name: f"{name}: {text}", **tolerance)


@pytest.fixture(autouse=True)
def quiet(capsys: pytest.CaptureFixture[str]) -> Iterator[None]:
    """The Trainer prints its log."""
    yield
    capsys.readouterr()


@pytest.mark.parametrize("head", ["mos", "pointer"])
def test_the_same_as_a_plain_loop(head: str, tiny_model: Make, texts: list[Example], tmp_path: Path) -> None:
    def start() -> Any:
        torch.manual_seed(0)
        return upgrade(tiny_model(), head).train()

    done = trainer(start(), texts, tmp_path)
    done.train()
    model, expected = start(), []
    optimiser = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0)
    for step in range(4):
        batch = padded_batch(texts[2 * step : 2 * step + 2])
        loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad()
        expected.append(float(loss.detach()))
    assert losses(done) == pytest.approx(expected, rel=1e-5)
    assert expected[-1] != pytest.approx(expected[0], rel=0.01)
    same_weights(done.model, model, atol=1e-5, rtol=1e-4)


def test_before_training_the_loss_is_the_originals(
    tiny_model: Make, texts: list[Example], tmp_path: Path
) -> None:
    original = trainer(tiny_model("gemma2"), texts, tmp_path).evaluate()["eval_loss"]
    made = upgrade(tiny_model("gemma2"), "mos")
    assert trainer(made, texts, tmp_path).evaluate()["eval_loss"] == pytest.approx(original, abs=1e-5)


def test_accumulated_batches_of_any_lengths_are_one_batch(
    tiny_model: Make, texts: list[Example], tmp_path: Path
) -> None:
    def start() -> Any:
        torch.manual_seed(0)
        return upgrade(tiny_model(), "mos")

    settings: dict[str, Any] = {"max_steps": 2, "optim": "sgd", "max_grad_norm": 0.0}
    whole = trainer(start(), texts, tmp_path, per_device_train_batch_size=4, **settings)
    parts = trainer(
        start(), texts, tmp_path, per_device_train_batch_size=1, gradient_accumulation_steps=4, **settings
    )
    whole.train()
    parts.train()
    assert losses(parts) == pytest.approx(losses(whole), rel=1e-5)
    same_weights(parts.model, whole.model, atol=1e-5, rtol=1e-4)
    # The mean of four means would be another number: the texts differ in length.
    alone = [float(start()(**padded_batch([one])).loss.detach()) for one in texts[:4]]
    assert losses(whole)[0] != pytest.approx(sum(alone) / 4, rel=1e-3)


def test_label_smoothing_is_the_originals(tiny_model: Make, texts: list[Example], tmp_path: Path) -> None:
    found = []
    for model in (tiny_model(), upgrade(tiny_model(), "mos")):
        done = trainer(model, texts, tmp_path, label_smoothing_factor=0.1, max_steps=1)
        done.train()
        found.append(losses(done)[0])
    assert found[1] == pytest.approx(found[0], rel=1e-5)


def test_evaluation_without_a_table_and_metrics_with_one(
    tiny_model: Make, texts: list[Example], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = upgrade(tiny_model(), "mos")
    tables = []
    log_probs = type(model)._log_probs

    def watched(self: Any, *rest: Any) -> Tensor:
        tables.append(len(tables))
        return log_probs(self, *rest)

    monkeypatch.setattr(type(model), "_log_probs", watched)
    model.config.return_logits = False
    done = trainer(model, texts, tmp_path)
    batches = [texts[:3], texts[3:6], texts[6:]]
    each = [float(model(**padded_batch(batch)).loss.detach()) for batch in batches]
    expected = sum(loss * len(batch) for loss, batch in zip(each, batches, strict=True)) / len(texts)
    assert done.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-5)
    assert not tables

    def accuracy(predicted: Any) -> dict[str, float]:
        kept = predicted.label_ids[:, 1:] != -100
        right = predicted.predictions.argmax(-1)[:, :-1] == predicted.label_ids[:, 1:]
        return {"accuracy": float(right[kept].mean()), "counted": float(np.sum(kept))}

    model.config.return_logits = None
    trainer(model, texts, tmp_path, max_steps=1, learning_rate=0.0).train()
    assert not tables
    measured = trainer(model, texts, tmp_path, compute_metrics=accuracy).evaluate()
    assert tables
    assert measured["eval_loss"] == pytest.approx(expected, rel=1e-5)
    original = trainer(tiny_model(), texts, tmp_path, compute_metrics=accuracy).evaluate()
    assert measured["eval_accuracy"] == original["eval_accuracy"]
    assert measured["eval_counted"] == sum(int((one["labels"][1:] != -100).sum()) for one in texts)


# Tied weights are what a resumed run can get wrong.
@pytest.mark.parametrize("tied", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_resumed_run_ends_with_the_weights_of_an_uninterrupted_one(
    tied: bool, tiny_model: Make, texts: list[Example], tmp_path: Path
) -> None:
    family = "llama" if tied else "llama untied"

    def start() -> Any:
        torch.manual_seed(0)
        return upgrade(tiny_model(family, attention_dropout=0.2), "mos", dropout=0.1).train()

    settings: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2, "max_steps": 5}
    settings |= {"lr_scheduler_type": "linear", "train_sampling_strategy": "random"}
    whole = trainer(start(), texts, tmp_path / "whole", **settings)
    whole.train()
    # Other weights than those that were saved, so that what is not read back is seen.
    other = start()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.1)
    resumed = trainer(other, texts, tmp_path / "resumed", **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    assert losses(resumed) == losses(whole)
    same_weights(resumed.model, whole.model, atol=0.0, rtol=0.0)
    last = type(whole.model).from_pretrained(tmp_path / "whole" / "checkpoint-5")
    same_weights(last, whole.model, atol=0.0, rtol=0.0)
    embedding = last.get_input_embeddings().weight
    assert (last.get_output_embeddings().weight is embedding) is tied
