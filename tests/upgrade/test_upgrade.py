"""The same distribution after an upgrade as before it, whatever the head and the original's output layer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fullrank.errors import FullrankError
from fullrank.models import FullrankForCausalLM, loading
from fullrank.upgrade import original, upgrade
from fullrank.upgrade.upgrade import dequantised

Make = Callable[..., Any]

SAME = [
    "softmax",
    "moc",
    "mos",
    "trunk",
    "doc",
    "low_rank",
    "pointer",
    "facets",
    "sigsoftmax",
    "moss",
    "plif",
]


@torch.no_grad()
def log_probs(model: Any, ids: Tensor) -> Tensor:
    return model(input_ids=ids).logits.float().log_softmax(-1)


@pytest.mark.parametrize("head", SAME)
@pytest.mark.parametrize("family", ["llama", "cohere", "phi"], ids=["tied", "scaled", "biased"])
def test_log_probabilities_stay(head: str, family: str, tiny_model: Make, ids: Tensor) -> None:
    model = tiny_model(family)
    expected = log_probs(model, ids)
    assert expected.exp().max() > 0.2  # a flat distribution would be kept by anything
    made = upgrade(model, head)
    torch.testing.assert_close(log_probs(made, ids), expected, atol=2e-5, rtol=0)
    assert made.config.origin["kl"] < 1e-9
    assert made.config.origin["architecture"] == type(model).__name__


@pytest.mark.parametrize("head", SAME)
def test_a_soft_cap_stays(head: str, tiny_model: Make, ids: Tensor) -> None:
    model = tiny_model("gemma2")
    expected = log_probs(model, ids)
    raw = model.get_output_embeddings()(model.model(ids).last_hidden_state)
    assert raw.abs().max() > 5.0  # the cap of 5 bends
    # Piecewise linear is not tanh.
    torch.testing.assert_close(
        log_probs(upgrade(model, head), ids), expected, atol=1e-4 if head == "plif" else 2e-5, rtol=0
    )


@pytest.mark.parametrize("head", ["sigsoftmax", "moss"])
def test_a_bent_head_over_a_cap_is_saved_and_its_lift_is_trained(
    head: str, tiny_model: Make, ids: Tensor, tmp_path: Path
) -> None:
    model = tiny_model("gemma2").to(torch.bfloat16)
    made = upgrade(model, head)
    assert made.config.softcap == 5.0
    made.save_pretrained(tmp_path)
    again = FullrankForCausalLM.from_pretrained(tmp_path)
    # In bf16 a small lift would be lost in its rounding.
    assert again.lm_head.lift.dtype == torch.float32
    assert again.lm_head.lift.item() == made.lm_head.lift.item() > 5.0
    again.float()
    with torch.no_grad():
        again.lm_head.lift.fill_(0.0)
    again(input_ids=ids, labels=ids).loss.backward()
    assert again.lm_head.lift.grad.abs().item() > 1e-4


def test_a_low_rank_says_what_it_costs(tiny_model: Make, ids: Tensor) -> None:
    model = tiny_model()
    narrow, wide = (upgrade(model, "low_rank", rank=rank).config.origin["kl"] for rank in (4, 16))
    assert narrow > wide > 1e-4
    # The directions kept are those of the largest singular values of W.
    weight = model.get_output_embeddings().weight.detach().double()
    left, values, right = torch.linalg.svd(weight, full_matrices=False)
    states = model.model(ids).last_hidden_state.detach().double()
    best = states @ ((left[:, :4] * values[:4]) @ right[:4]).T
    found = log_probs(upgrade(model, "low_rank", rank=4), ids).double()
    torch.testing.assert_close(found, best.log_softmax(-1), atol=1e-4, rtol=0)


@pytest.mark.parametrize("tied", [True, False])
def test_nothing_is_copied(tied: bool, tiny_model: Make) -> None:
    model = tiny_model("llama" if tied else "llama untied")
    weight = model.get_output_embeddings().weight
    made = upgrade(model, "mos")
    assert made.model is model.model
    assert made.get_output_embeddings().weight is weight
    assert (made.get_input_embeddings().weight is weight) is tied
    assert made.config.tie_word_embeddings is tied
    own = sum(item.numel() for item in made.parameters())
    head = sum(item.numel() for item in made.lm_head.parameters()) - weight.numel()
    assert own == sum(item.numel() for item in model.parameters()) + head


def test_a_bias_is_the_originals(tiny_model: Make) -> None:
    model = tiny_model("phi")
    assert upgrade(model, "mos").get_output_embeddings().bias is model.get_output_embeddings().bias


def test_padding_rows_stay(tiny_model: Make, ids: Tensor) -> None:
    """Rows that no token names have probability in the original, and so in the upgrade."""
    model = tiny_model("llama", vocab_size=128)
    found = log_probs(upgrade(model, "trunk"), ids)
    assert found.shape[-1] == 128
    torch.testing.assert_close(found, log_probs(model, ids), atol=2e-5, rtol=0)


def cut(model: Any, columns: int) -> None:
    """Make a model drop the last columns of its logits, as some do with padding."""
    forward = model.forward

    def shorter(*arguments: Any, **settings: Any) -> Any:
        output = forward(*arguments, **settings)
        output.logits = output.logits[..., :columns]
        return output

    model.forward = shorter


def test_logits_that_the_model_cuts_are_cut(tiny_model: Make, ids: Tensor) -> None:
    model = tiny_model("llama untied")
    cut(model, 97)
    made = upgrade(model, "mos")
    torch.testing.assert_close(log_probs(made, ids % 97), log_probs(model, ids % 97), atol=2e-5, rtol=0)
    tied = tiny_model("llama")
    cut(tied, 97)
    with pytest.raises(FullrankError, match="resize_token_embeddings"):
        upgrade(tied, "mos")


def test_gates_fit_the_size_of_the_states(tiny_model: Make, ids: Tensor) -> None:
    """States a hundred times larger must not leave one component with all the weight."""
    model = tiny_model("llama untied")
    with torch.no_grad():
        model.model.norm.weight.mul_(100.0)
        model.lm_head.weight.div_(100.0)
    made = upgrade(model, "mos", components=4)
    with torch.no_grad():
        _, log_prior = made.lm_head.contexts([made.model(ids).last_hidden_state])
    assert log_prior.exp().max(-1).values.mean() < 0.9
    assert log_prior.std(dim=(0, 1)).min() > 0.1


def test_modes_and_gradients_are_the_originals(tiny_model: Make) -> None:
    model = tiny_model().train()
    model.model.requires_grad_(False)
    made = upgrade(model, "mos")
    assert model.training
    assert made.training
    assert not any(item.requires_grad for item in made.model.parameters())
    assert all(item.requires_grad for item in made.lm_head.contexts.parameters())
    assert made.generation_config.eos_token_id == model.generation_config.eos_token_id


def same_weights(one: torch.nn.Module, other: torch.nn.Module) -> None:
    """To the bit, which is what the disk must keep; products of them may be blocked otherwise."""
    expected = other.state_dict()
    assert one.state_dict().keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in one.state_dict().items())


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
@pytest.mark.parametrize("head", ["mos", "sigsoftmax", "plif", "pointer"])
def test_half_precision(head: str, tiny_model: Make, ids: Tensor, tmp_path: Path) -> None:
    model = tiny_model("phi").to(torch.bfloat16)
    exact, rounded = log_probs(tiny_model("phi"), ids), log_probs(model, ids)
    made = upgrade(model, head)
    found = log_probs(made, ids)
    error = float((exact.exp() * (exact - rounded)).sum(-1).mean())
    made.save_pretrained(tmp_path)
    again = FullrankForCausalLM.from_pretrained(tmp_path)
    assert again.dtype == torch.bfloat16
    same_weights(again, made)
    # How a processor cuts a bf16 product into blocks depends on where the weights lie in memory: each sum is
    # rounded to bf16, so one step of it at the size of the log-probabilities is all that may come between.
    step = torch.finfo(torch.bfloat16).eps * float(found.abs().max())
    torch.testing.assert_close(log_probs(again, ids), found, atol=step, rtol=0)
    # Not much further from the truth than the original is in that precision.
    assert float((exact.exp() * (exact - found)).sum(-1).mean()) < 2 * error + 1e-4


def saved(model: Any, tokenizer: Any, directory: Path) -> Path:
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {f"w{number}": number for number in range(101)}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w0")))


def test_a_directory_and_what_was_loaded_from_it(
    tiny_model: Make, tokenizer: Any, ids: Tensor, tmp_path: Path
) -> None:
    expected = log_probs(tiny_model(), ids)
    directory = saved(tiny_model(), tokenizer, tmp_path / "tiny")
    made = upgrade(directory, "mos")
    torch.testing.assert_close(log_probs(made, ids), expected, atol=2e-5, rtol=0)
    assert all(item.requires_grad for item in made.parameters())
    assert made.config.origin["name"] == "tiny"
    assert upgrade(str(directory), "softmax").config.origin["name"] == "tiny"
    loaded = upgrade(loading.load(directory), "mos")
    assert not any(item.requires_grad for item in loaded.model.parameters())


def test_upgrade_save_load(tiny_model: Make, ids: Tensor, tmp_path: Path) -> None:
    made = upgrade(tiny_model("gemma2"), "trunk", components=3, private=5)
    made.save_pretrained(tmp_path)
    again = FullrankForCausalLM.from_pretrained(tmp_path)
    same_weights(again, made)
    torch.testing.assert_close(log_probs(again, ids), log_probs(made, ids))
    assert again.config.origin == made.config.origin
    assert again.config.softcap == 5.0
    assert again.generation_config.to_dict() == made.generation_config.to_dict()


def test_heads_that_cannot_start_as_the_original(tiny_model: Make) -> None:
    with pytest.raises(FullrankError, match="tanh"):
        upgrade(tiny_model(), "mixtape")
    with pytest.raises(FullrankError, match="tanh"):
        upgrade(tiny_model(), "mos", as_published=True)
    with pytest.raises(FullrankError, match="decides"):
        upgrade(tiny_model(), "mos", bias=True)
    with pytest.raises(FullrankError, match="did you mean 'mos'"):
        upgrade(tiny_model(), "mosx")
    with pytest.raises(FullrankError, match="no option componets"):
        upgrade(tiny_model(), "mos", componets=2)
    with pytest.raises(FullrankError, match="doc"):
        upgrade(tiny_model("opt projected"), "facets")
    with pytest.raises(FullrankError, match=r"doc cannot be built with layers=3 .*docs/heads.md"):
        upgrade(tiny_model(), "doc", layers=3)
    with pytest.raises(FullrankError, match="rerank=4"):
        upgrade(tiny_model(), "pointer", rerank=4)


def test_a_configuration_says_how_many_components(tiny_model: Make) -> None:
    assert upgrade(tiny_model(), "mos").config.head["components"] == 4
    assert upgrade(tiny_model(), "mos", components=2).config.head["components"] == 2
    assert "components" not in upgrade(tiny_model(), "plif").config.head


def test_a_quantised_model_that_a_command_loaded_is_put_into_float(
    tiny_model: Make, tokenizer: Any, ids: Tensor, tmp_path: Path
) -> None:
    """As a library would: weights in a few levels, and a method that brings them back."""
    loaded = loading.load(saved(tiny_model(), tokenizer, tmp_path / "tiny"))
    expected = log_probs(loaded.model, ids)
    model: Any = loaded.model

    def dequantize() -> Any:
        del model.config.quantization_config
        return model.to(torch.bfloat16).float()

    model.config.quantization_config = {"quant_method": "levels"}
    model.dequantize = dequantize
    found = dequantised(loaded)
    assert "were quantised" in found.notes[-1]
    assert upgrade(found, "mos").dtype == torch.float32
    torch.testing.assert_close(log_probs(upgrade(found, "mos"), ids), log_probs(model, ids))
    assert not torch.equal(log_probs(model, ids), expected)
    assert dequantised(found) is found
    model.config.quantization_config = {"quant_method": "levels"}
    del model.dequantize
    with pytest.raises(FullrankError, match="tiny, which is quantised, cannot be loaded"):
        dequantised(found)


def small_bert(cls: str, **changes: Any) -> Any:
    import transformers

    sizes = {"vocab_size": 101, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.BertConfig(**sizes, intermediate_size=48, **changes)
    return getattr(transformers, cls)(config)


@pytest.mark.parametrize(
    ("cls", "changes", "message"),
    [
        ("BertModel", {}, "no output layer"),
        ("BertForMaskedLM", {}, "sees later tokens"),
        ("BertLMHeadModel", {"is_decoder": True}, "changes its body's last state"),
    ],
)
def test_encoders_and_deeper_heads(cls: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(FullrankError, match=message):
        upgrade(small_bert(cls, **changes), "mos")


def test_other_things_that_are_no_causal_model(tiny_model: Make) -> None:
    from transformers import T5Config, T5ForConditionalGeneration

    t5 = T5ForConditionalGeneration(
        T5Config(vocab_size=50, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2)
    )
    with pytest.raises(FullrankError, match="encoder-decoder"):
        upgrade(t5, "mos")
    with pytest.raises(FullrankError, match="Linear"):
        upgrade(torch.nn.Linear(2, 2), "mos")
    with pytest.raises(FullrankError, match="no such path"):
        upgrade("./nowhere", "mos")
    with pytest.raises(FullrankError, match="has a mos head already"):
        upgrade(upgrade(tiny_model(), "mos"), "trunk")
    quantised = tiny_model()
    quantised.config.quantization_config = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    with pytest.raises(FullrankError, match="dequantize"):
        upgrade(quantised, "mos")


def test_logits_that_are_no_linear_map(tiny_model: Make) -> None:
    model = tiny_model().train()
    forward = model.forward

    def bent(*arguments: Any, **settings: Any) -> Any:
        output = forward(*arguments, **settings)
        output.logits = output.logits.abs()
        return output

    model.forward = bent
    with pytest.raises(FullrankError, match="not its output matrix"):
        upgrade(model, "mos")
    assert model.training  # as it came


def test_a_body_that_does_more_than_its_output_layer_shows(
    tiny_model: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last look compares both models whole: a difference that no reading saw is refused."""
    read = original.read

    def wrong(*arguments: Any) -> Any:
        layer, found = read(*arguments)
        return layer, found.roll(1, dims=-1)

    monkeypatch.setattr(original, "read", wrong)
    with pytest.raises(FullrankError, match="nats away"):
        upgrade(tiny_model(), "mos")
