"""The model class: loss, log-probabilities, weights on disk, tying, resizing, dtypes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from fullrank.errors import FullrankError
from fullrank.heads import HEADS
from fullrank.models import FullrankConfig, FullrankForCausalLM
from fullrank.upgrade import upgrade

Make = Callable[..., Any]

OPTIONS: dict[str, dict[str, Any]] = {
    "low_rank": {"rank": 8},
    "mos": {"components": 3},
    "mixtape": {"gate_width": 4},
    "facets": {"layers": 2, "positions": 2},
    "pointer": {"rerank": [5]},
}


def with_head(tiny_model: Make, name: str = "mos", family: str = "llama", **changes: Any) -> Any:
    """A model that nobody upgraded: the body and a head with random weights."""
    body = tiny_model(family).config
    torch.manual_seed(3)
    head = {"name": name, "hidden": 32, **OPTIONS.get(name, {})}
    model = FullrankForCausalLM(FullrankConfig(body=body, head=head, **changes)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                # Away from the start, where many heads are one.
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


@pytest.mark.parametrize("name", sorted(HEADS))
def test_any_head_trains_scores_and_survives_the_disk(
    name: str, tiny_model: Make, ids: Tensor, tmp_path: Path
) -> None:
    model = with_head(tiny_model, name, tie_word_embeddings=name != "facets")
    output = model(ids)
    assert output.logits.dtype == torch.float32
    torch.testing.assert_close(output.logits.logsumexp(-1), torch.zeros(ids.shape), atol=1e-5, rtol=0)
    log_probs = output.logits[:, :-1].gather(-1, ids[:, 1:, None])
    loss = model(ids, labels=ids).loss
    torch.testing.assert_close(loss, -log_probs.mean(), atol=1e-5, rtol=1e-5)
    loss.backward()
    without = {key for key, item in model.named_parameters() if item.grad is None or not item.grad.any()}
    assert not without
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert set(again.state_dict()) == set(model.state_dict())
    assert all(torch.equal(item, again.state_dict()[key]) for key, item in model.state_dict().items())
    torch.testing.assert_close(again(ids).logits, model(ids).logits)


def test_logits_come_with_labels_unless_the_user_or_a_training_step_of_the_trainer_leaves_them_out(
    tiny_model: Make, ids: Tensor
) -> None:
    model, count = with_head(tiny_model), ids.numel()
    expected = model(ids).logits
    for training in (False, True):
        output = model.train(training)(ids, labels=ids)
        torch.testing.assert_close(output.logits, expected)
        torch.testing.assert_close(output[1], expected)
        assert model(ids, labels=ids, return_logits=False).logits is None
        # The trainer's evaluation counts tokens too, and may read the logits.
        output = model(ids, labels=ids, num_items_in_batch=count)
        assert (output.logits is None) is training
    assert model(ids, labels=ids, num_items_in_batch=count, return_logits=True).logits is not None
    model.config.return_logits = False
    assert model(ids, labels=ids).logits is None
    assert model(ids).logits is not None
    assert model(ids).loss is None


def test_labels_need_no_table_of_tokens_by_vocabulary(tiny_model: Make, ids: Tensor) -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    widest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal widest
            out = func(*args, **(kwargs or {}))
            for item in out if isinstance(out, tuple | list) else (out,):
                if isinstance(item, Tensor) and item.ndim > 1 and item.shape[-1] == 101:
                    widest = max(widest, item.numel() // 101)
            return out

    model, long = with_head(tiny_model), ids.repeat(1, 5)
    with Watch():
        model(long, labels=long, return_logits=False).loss.backward()
    assert widest <= 32  # rows of W's own transpose, never the 110 tokens
    with Watch():
        model(long)
    assert widest >= long.numel()


def test_the_sum_over_the_count_that_the_trainer_gives(tiny_model: Make, ids: Tensor) -> None:
    model = with_head(tiny_model)
    labels = ids.clone()
    labels[0, 4:] = -100
    mean = model(ids, labels=labels).loss
    counted = int((labels[:, 1:] != -100).sum())
    for count in (40, torch.tensor(40)):
        loss = model(ids, labels=labels, num_items_in_batch=count).loss
        torch.testing.assert_close(loss, mean * counted / 40)
    shifted = torch.nn.functional.pad(labels, (0, 1), value=-100)[:, 1:]
    torch.testing.assert_close(model(ids, shift_labels=shifted).loss, mean)
    assert model.loss_type == "ForCausalLM"
    assert model.accepts_loss_kwargs


@pytest.mark.parametrize("name", ["mos", "doc", "pointer", "facets"])
def test_logits_to_keep(name: str, tiny_model: Make, ids: Tensor) -> None:
    model = with_head(tiny_model, name)
    every = model(ids).logits
    torch.testing.assert_close(model(ids, logits_to_keep=2).logits, every[:, -2:])
    chosen = torch.tensor([0, 5])
    torch.testing.assert_close(model(ids, logits_to_keep=chosen).logits, every[:, chosen])


@pytest.mark.parametrize("name", ["pointer", "facets"])
def test_padding_is_not_read(name: str, tiny_model: Make, ids: Tensor, padded: dict[str, Tensor]) -> None:
    model = with_head(tiny_model, name)
    places = (padded["attention_mask"].cumsum(-1) - 1).clamp_min(0)
    inside = model(**padded, position_ids=places).logits[0, 3:]
    torch.testing.assert_close(inside, model(ids[:1, 3:]).logits[0], atol=1e-5, rtol=1e-5)


def test_hidden_states_as_the_body_has_them(tiny_model: Make, ids: Tensor) -> None:
    model = with_head(tiny_model, "doc")
    assert model(ids).hidden_states is None
    found = model(ids, output_hidden_states=True).hidden_states
    assert len(found) == 4
    assert isinstance(model(ids, return_dict=False), tuple)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", ["mos", "sigsoftmax", "pointer"])
def test_resizing(name: str, tied: bool, tiny_model: Make, ids: Tensor, tmp_path: Path) -> None:
    model = upgrade(tiny_model("llama" if tied else "llama untied"), name)
    before = model(ids).logits.detach()
    model.resize_token_embeddings(120)
    assert (model.get_output_embeddings().weight is model.get_input_embeddings().weight) is tied
    assert model.config.vocab_size == model.model.config.vocab_size == model.lm_head.vocab == 120
    after = model(ids).logits
    assert after.shape[-1] == 120
    # The old tokens keep their odds, and the new ones are no better and no worse than an average row.
    old = after[..., :101].log_softmax(-1)
    torch.testing.assert_close(old, before, atol=1e-4, rtol=1e-4)
    assert after[..., 101:].exp().sum(-1).max() < 0.6
    model(ids, labels=ids).loss.backward()
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(again(ids).logits, after)
    again.resize_token_embeddings(101)
    torch.testing.assert_close(again(ids).logits, before, atol=1e-4, rtol=1e-4)


def test_a_head_with_parameters_a_token_keeps_its_size(tiny_model: Make) -> None:
    model = with_head(tiny_model, "mixtape")
    with pytest.raises(FullrankError, match="cannot be resized"):
        model.resize_token_embeddings(120)
    assert model.get_input_embeddings().weight.shape[0] == 101


def test_what_adapters_and_trainers_look_for(tiny_model: Make) -> None:
    model = with_head(tiny_model, tie_word_embeddings=True)
    assert isinstance(model.get_output_embeddings(), torch.nn.Linear)
    assert model.all_tied_weights_keys == {"lm_head.decoder.weight": "model.embed_tokens.weight"}
    assert model.base_model == model.model
    assert model.get_decoder() is model.model
    assert {"LlamaDecoderLayer", "MixtureOfSoftmaxes"} <= set(model._no_split_modules)


def test_gradient_checkpointing_changes_no_gradient(tiny_model: Make, ids: Tensor) -> None:
    model = with_head(tiny_model).train()
    model(ids, labels=ids).loss.backward()
    expected = {key: item.grad.clone() for key, item in model.named_parameters()}
    model.zero_grad()
    model.gradient_checkpointing_enable()
    assert model.model.gradient_checkpointing
    model(ids, labels=ids).loss.backward()
    for key, item in model.named_parameters():
        torch.testing.assert_close(item.grad, expected[key])


# Some CPUs say that they multiply bf16 the slow way.
@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
def test_half_precision_and_device_map(tiny_model: Make, ids: Tensor, tmp_path: Path) -> None:
    model = with_head(tiny_model)
    model.save_pretrained(tmp_path)
    half = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16, device_map={"": "cpu"})
    assert {item.dtype for item in half.parameters()} == {torch.bfloat16}
    with torch.no_grad():
        output, wide = half(ids), model(ids).logits
    assert output.logits.dtype == torch.float32
    assert float((wide.exp() * (wide - output.logits)).sum(-1).mean()) < 0.02
    loss = half(ids, labels=ids).loss
    assert loss.dtype == torch.float32
    loss.backward()
    assert half.lm_head.decoder.weight.grad.dtype == torch.bfloat16


def test_weights_that_a_checkpoint_lacks_are_drawn_as_the_head_draws_them(
    tiny_model: Make, ids: Tensor, tmp_path: Path
) -> None:
    from safetensors.torch import load_file, save_file

    upgrade(tiny_model(), "mos").save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    kept = {key: item for key, item in stored.items() if "contexts" not in key}
    assert len(kept) < len(stored)
    save_file(kept, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert not model.lm_head.contexts.differences[0].weight.any()
    assert model.lm_head.contexts.gate.weight.any()
    torch.testing.assert_close(
        model(ids).logits, tiny_model()(ids).logits.log_softmax(-1), atol=1e-5, rtol=1e-5
    )


def test_a_pointer_refuses_what_hides_earlier_tokens(tiny_model: Make, ids: Tensor) -> None:
    model = with_head(tiny_model, "pointer")
    cache = model.model(ids, use_cache=True).past_key_values
    with pytest.raises(FullrankError, match="use_cache=False"):
        model(ids[:, -1:], past_key_values=cache)
    with pytest.raises(FullrankError, match="input_ids"):
        model(inputs_embeds=model.get_input_embeddings()(ids))


def test_more_layers_than_the_body_has(tiny_model: Make, ids: Tensor) -> None:
    body = tiny_model().config
    head = {"name": "doc", "hidden": 32, "layers": [[32, 1]] * 6}
    model = FullrankForCausalLM(FullrankConfig(body=body, head=head))
    with pytest.raises(FullrankError, match="fewer layers"):
        model(ids)


def test_a_copy_stands_alone(tiny_model: Make, ids: Tensor) -> None:
    model = with_head(tiny_model, tie_word_embeddings=True)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.get_input_embeddings().weight.zero_()
    assert twin.get_output_embeddings().weight is twin.get_input_embeddings().weight
    assert model.get_output_embeddings().weight.any()
    assert float((twin(ids).logits.detach() - model(ids).logits.detach()).abs().max()) > 0.01
