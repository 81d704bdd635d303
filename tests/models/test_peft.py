"""PEFT on an upgraded model: LoRA in the body, the head among the modules to save."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from fullrank.errors import FullrankError
from fullrank.models import FullrankForCausalLM
from fullrank.train import FullrankMonitor
from fullrank.upgrade import upgrade

peft = pytest.importorskip("peft")
Make = Callable[..., Any]

# PEFT says that a copy of a tied head is not tied, twice.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`"),
    pytest.mark.filterwarnings("ignore:Input and output embeddings are no longer tied"),
]
FAMILIES = {"llama": ["q_proj", "v_proj"], "gpt_neox": ["query_key_value"], "gemma2": ["q_proj", "down_proj"]}


def adapted(model: Any, **settings: Any) -> Any:
    torch.manual_seed(1)
    options = {"r": 4, "lora_dropout": 0.0, "task_type": "CAUSAL_LM", "modules_to_save": ["lm_head"]}
    return peft.get_peft_model(model, peft.LoraConfig(**{**options, **settings}))


def train(model: Any, inputs: dict[str, Tensor], steps: int = 3) -> list[float]:
    labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
    optimiser = torch.optim.AdamW([item for item in model.parameters() if item.requires_grad], lr=0.02)
    losses = []
    for _ in range(steps):
        loss = model(**inputs, labels=labels).loss
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()
        losses.append(float(loss.detach()))
    return losses


@torch.no_grad()
def log_probs(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    return model.eval()(**inputs).logits


# Each family and each head; the other pairs are the same parts once more.
@pytest.mark.parametrize(
    ("family", "head"),
    [
        *(("llama", "mos"), ("llama untied", "pointer"), ("gpt_neox", "pointer"), ("gemma2", "mos")),
        *(
            pytest.param(family, head, marks=pytest.mark.slow)
            for family, head in (
                *(("llama", "pointer"), ("llama untied", "mos")),
                *(("gpt_neox", "mos"), ("gemma2", "pointer")),
            )
        ),
    ],
)
def test_train_merge_save_load(
    family: str, head: str, tiny_model: Make, padded: dict[str, Tensor], tmp_path: Path
) -> None:
    made = upgrade(tiny_model(family), head)
    made.save_pretrained(tmp_path / "base")
    before = log_probs(made, padded)
    kept = {name: item.clone() for name, item in made.lm_head.state_dict().items()}
    model = adapted(made, target_modules=FAMILIES[family.split()[0]])
    assert torch.equal(log_probs(model, padded), before)
    losses = train(model.train(), padded)
    assert losses[-1] < losses[0]
    trained = model.base_model.model.lm_head.modules_to_save["default"].state_dict()
    assert all(not torch.equal(item, trained[name]) for name, item in kept.items())
    after = log_probs(model, padded)
    assert float((after - before).abs().max()) > 0.1

    model.save_pretrained(tmp_path / "adapter")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    again = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")
    torch.testing.assert_close(log_probs(again, padded), after)
    with model.disable_adapter():
        assert torch.equal(log_probs(model, padded), before)

    settings = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    tokens = model.generate(**padded, **settings)
    merged = model.merge_and_unload()
    assert isinstance(merged, FullrankForCausalLM)
    torch.testing.assert_close(log_probs(merged, padded), after, atol=1e-4, rtol=1e-5)
    merged.save_pretrained(tmp_path / "merged")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(log_probs(loaded, padded), log_probs(merged, padded))
    assert torch.equal(loaded.generate(**padded, **settings), tokens)


@pytest.mark.parametrize("saved", [None, ["contexts"], ["decoder"]])
def test_other_choices_of_what_is_trained(
    saved: list[str] | None, tiny_model: Make, padded: dict[str, Tensor], tmp_path: Path
) -> None:
    """LoRA in every linear layer, those of the mixture too, and a part of the head saved whole."""
    made = upgrade(tiny_model("llama untied"), "mos")
    targets: Any = "all-linear" if saved is None else ["q_proj"]
    model = adapted(made, target_modules=targets, modules_to_save=saved)
    names = [name for name, item in model.named_parameters() if item.requires_grad]
    assert any("lora" in name and ".layers.0." in name for name in names)
    assert any("lm_head.contexts" in name for name in names) is (saved != ["decoder"])
    assert any("decoder" in name for name in names) is (saved == ["decoder"])
    losses = train(model.train(), padded)
    assert losses[-1] < losses[0]
    after = log_probs(model, padded)
    merged = model.merge_and_unload()
    merged.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(log_probs(loaded, padded), after, atol=1e-4, rtol=1e-5)


def test_an_adapter_that_the_head_would_pass_by_is_refused(
    tiny_model: Make, padded: dict[str, Tensor]
) -> None:
    model = adapted(upgrade(tiny_model(), "mos"), target_modules=["q_proj", "decoder"], modules_to_save=None)
    with pytest.raises(FullrankError, match="modules_to_save"):
        model(**padded)


def test_the_trainer_and_the_monitor_see_the_head_that_runs(
    tiny_model: Make, ids: Tensor, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import Trainer, TrainingArguments

    model = adapted(upgrade(tiny_model(), "mos"), target_modules=["q_proj"])
    arguments = TrainingArguments(
        output_dir=str(tmp_path), use_cpu=True, report_to="none", disable_tqdm=True, max_steps=2,
        learning_rate=0.01, save_strategy="no", dataloader_pin_memory=False,
    )  # fmt: skip
    rows = [{"input_ids": row, "labels": row} for row in ids]
    trainer = Trainer(model, arguments, train_dataset=rows, eval_dataset=rows)
    trainer.add_callback(FullrankMonitor(trainer))
    with torch.no_grad():
        active = model.base_model.model.lm_head.modules_to_save["default"]
        active.decoder.weight[:, 1:] = 0.0
    trainer.evaluate()
    (found,) = [line for line in trainer.state.log_history if "eval_head_effective_rank" in line]
    assert found["eval_head_effective_rank"] == pytest.approx(1.0, abs=1e-3)
    assert sum(found[f"eval_component_shares/{k}"] for k in range(4)) == pytest.approx(1.0)
    trainer.train()
    capsys.readouterr()
