"""Trainers that go past the model's forward: TRL's fused output layer, and states times the output embedding.

TRL is not needed: `patched` does what its `add_fused_lm_head` (1.15 and 1.16) does, `bypassed` what its
`chunked_nll` did before, and its distillation does.
"""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fullrank.errors import FullrankError
from fullrank.heads import HEADS
from fullrank.models import FullrankConfig, FullrankForCausalLM
from fullrank.upgrade import upgrade

Make = Callable[..., Any]
OPTIONS: dict[str, dict[str, Any]] = {
    "low_rank": {"rank": 8}, "mos": {"components": 3}, "mixtape": {"gate_width": 4},
    "facets": {"layers": 2, "positions": 2}, "pointer": {"rerank": [5]},
}  # fmt: skip
EVERY = ("log_probs", "entropy", "is_top1", "log_sum_sq_probs", "mean_logits")


def with_head(tiny_model: Make, name: str, **changes: Any) -> Any:
    torch.manual_seed(3)
    head = {"name": name, "hidden": 32, **OPTIONS.get(name, {})}
    model = FullrankForCausalLM(FullrankConfig(body=tiny_model().config, head=head, **changes)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                # Away from the start, where many heads are one.
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def labels_of(ids: Tensor) -> Tensor:
    labels = ids.clone()
    labels[0, :4] = -100
    return labels


def bypassed(model: Any, ids: Tensor, labels: Tensor) -> Tensor:
    """A loss from the states of the base model and the weight of the output embedding."""
    states = model.base_model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1]
    logits = states @ model.get_output_embeddings().weight.T
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())


def patched(model: Any, temperature: float = 1.0, outputs: tuple[str, ...] = ("log_probs",)) -> Any:
    """The model with a forward that answers `fused_lm_head=True` by the same bypass."""
    original = model.forward

    @functools.wraps(type(model).forward)
    def fused(self: Any, *arguments: Any, fused_lm_head: bool = False, **inputs: Any) -> Any:
        if not fused_lm_head:
            return original(*arguments, **inputs)
        assert outputs
        return types.SimpleNamespace(
            loss=bypassed(self, inputs["input_ids"], inputs["labels"]) / temperature, log_probs=None
        )

    model.forward = types.MethodType(fused, model)
    return model


def table_of(model: Any, ids: Tensor, temperature: float = 1.0) -> Tensor:
    return (model(ids).logits[:, :-1] / temperature).log_softmax(-1)


@pytest.mark.parametrize("name", sorted(HEADS))
def test_a_head_answers_the_fused_output_layer_with_its_own_loss(
    name: str, tiny_model: Make, ids: Tensor
) -> None:
    model = patched(with_head(tiny_model, name, logit_scale=0.7, **softcap(name)), outputs=EVERY)
    labels = labels_of(ids)
    mask = labels[:, 1:] != -100
    output = model(input_ids=ids, labels=labels, fused_lm_head=True, use_cache=False)
    torch.testing.assert_close(output.loss, model(ids, labels=labels).loss, atol=1e-5, rtol=1e-5)
    output.loss.backward()
    parameters = dict(model.lm_head.named_parameters())
    assert not [key for key, item in parameters.items() if item.grad is None or not item.grad.any()]
    with torch.no_grad():
        table = table_of(model, ids)
    expected = {
        "log_probs": table.gather(-1, ids[:, 1:, None])[..., 0],
        "entropy": -(table.exp() * table).sum(-1),
        "log_sum_sq_probs": (2 * table).logsumexp(-1),
        "mean_logits": table.mean(-1),
        "is_top1": table.argmax(-1) == ids[:, 1:],
    }
    for field, value in expected.items():
        torch.testing.assert_close(output[field], value * mask, atol=1e-4, rtol=1e-4)
    assert torch.equal(output.label_mask, mask)
    # Labels that are shifted already count as they stand, and so does the trainer's number of tokens.
    shifted = torch.nn.functional.pad(labels, (0, 1), value=-100)[:, 1:]
    output = model(input_ids=ids, shift_labels=shifted, fused_lm_head=True, num_items_in_batch=40)
    torch.testing.assert_close(output.log_probs[:, :-1], expected["log_probs"] * mask, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(output.loss, -output.log_probs.sum() / 40)
    # Without the argument the model is as it was, and so is a copy.
    torch.testing.assert_close(model(ids).logits[:, :-1], table, atol=1e-5, rtol=1e-5)
    assert torch.equal(
        copy.deepcopy(model)(input_ids=ids, labels=labels, fused_lm_head=True).label_mask, mask
    )


def softcap(name: str) -> dict[str, float]:
    return {"softcap": 5.0} if name in ("softmax", "mos") else {}


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_a_policy_gradient_and_its_entropy_bonus_have_the_gradients_of_the_table(
    temperature: float, tiny_model: Make, ids: Tensor
) -> None:
    model = patched(with_head(tiny_model, "mos"), temperature, ("log_probs", "entropy"))
    labels = labels_of(ids)
    mask = labels[:, 1:] != -100
    output = model(input_ids=ids, labels=labels, fused_lm_head=True)
    (output.log_probs - 0.1 * output.entropy).sum().backward()
    gradients = {name: item.grad.clone() for name, item in model.named_parameters()}
    model.zero_grad()
    table = table_of(model, ids, temperature)
    entropy = -(table.exp() * table).sum(-1)
    ((table.gather(-1, ids[:, 1:, None])[..., 0] - 0.1 * entropy) * mask).sum().backward()
    for name, item in model.named_parameters():
        torch.testing.assert_close(gradients[name], item.grad, atol=1e-4, rtol=1e-3)


def test_what_the_head_cannot_give_a_trainer_is_refused(tiny_model: Make, ids: Tensor) -> None:
    model = patched(with_head(tiny_model, "pointer"), outputs=("log_probs", "entropy"))
    with pytest.raises(FullrankError, match="entropy_coef"):
        model(input_ids=ids, labels=ids, fused_lm_head=True).entropy.sum().backward()
    with pytest.raises(FullrankError, match=r"temperature=1\.0"):
        patched(model, 0.5)(input_ids=ids, labels=ids, fused_lm_head=True)
    with pytest.raises(FullrankError, match="router_aux_loss_coef"):
        model(input_ids=ids, labels=ids, fused_lm_head=True, output_router_logits=True)
    with pytest.raises(FullrankError, match="neither labels"):
        model(input_ids=ids, fused_lm_head=True)

    def another(self: Any, fused_lm_head: bool = False) -> None: ...

    with pytest.raises(FullrankError, match="no temperature"):
        model.forward = types.MethodType(another, model)


def test_a_text_without_a_label_gives_a_loss_of_0_with_a_gradient(tiny_model: Make, ids: Tensor) -> None:
    model = patched(with_head(tiny_model, "mos"), outputs=("log_probs", "entropy", "is_top1"))
    output = model(input_ids=ids, labels=torch.full_like(ids, -100), fused_lm_head=True)
    output.loss.backward()
    assert float(output.loss.detach()) == 0.0
    assert not model.lm_head.decoder.weight.grad.any()


def test_states_times_the_output_embedding_are_refused_where_they_are_another_loss(
    tiny_model: Make, ids: Tensor
) -> None:
    labels = labels_of(ids)
    plain = with_head(tiny_model, "softmax")
    torch.testing.assert_close(bypassed(plain, ids, labels), plain(ids, labels=labels).loss)
    scaled = with_head(tiny_model, "softmax", logit_scale=0.7)
    for model in (with_head(tiny_model, "mos"), scaled, with_head(tiny_model, "softmax", softcap=5.0)):
        with pytest.raises(FullrankError, match=r"call the model itself.*model\.model"):
            bypassed(model, ids, labels)
        # All else of the body is there, for reading and for writing.
        assert model.base_model.config is model.model.config
        model.base_model.gradient_checkpointing = True
        assert model.model.gradient_checkpointing
        assert model.model(ids).last_hidden_state.shape == (*ids.shape, 32)


@pytest.mark.parametrize("family", ["gemma2", "cohere"])
def test_a_softmax_with_a_soft_cap_or_a_scale_is_upgraded_further(
    family: str, tiny_model: Make, ids: Tensor
) -> None:
    plain = upgrade(tiny_model(family), "softmax")
    mixture = upgrade(plain, "mos", components=3)
    torch.testing.assert_close(mixture(ids).logits, plain(ids).logits, atol=1e-4, rtol=1e-4)
