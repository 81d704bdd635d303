"""AWD-LSTM against a plain stack of torch's LSTMs, and its masks one by one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from fullrank.errors import FullrankError
from fullrank.models import AwdLstmConfig, FullrankConfig, FullrankForCausalLM
from fullrank.models.awd_lstm import AwdLstmModel, AwdLstmOutput, LstmLayer

V, EMBEDDING, HIDDEN, LAST = 23, 5, 7, 6
BATCH, TIME = 3, 8
DROPOUTS = ("dropout", "dropout_embedding", "dropout_input", "dropout_hidden", "weight_drop")


SIZES = {
    "vocab_size": V, "embedding_size": EMBEDDING, "inner_size": HIDDEN, "hidden_size": LAST,
    "num_hidden_layers": 3, "output_hidden_states": True,
}  # fmt: skip


def body(**options: Any) -> AwdLstmModel:
    torch.manual_seed(0)
    return AwdLstmModel(AwdLstmConfig(**{**SIZES, **options})).double()


def states(output: AwdLstmOutput) -> list[Tensor]:
    """Of the layers, the last first."""
    return list(reversed(output.hidden_states[1:]))


def tokens(batch: int = BATCH, time: int = TIME) -> Tensor:
    return torch.randint(V, (batch, time), generator=torch.Generator().manual_seed(1))


class Plain(nn.Module):
    """The same stack from torch's own modules."""

    def __init__(self, like: AwdLstmModel) -> None:
        super().__init__()
        self.embedding = nn.Embedding(V, like.embedding.embedding_dim)
        sources = [layer.source for layer in like.layers]
        outputs = [layer.width for layer in like.layers]
        self.layers = nn.ModuleList(
            nn.LSTM(source, width, batch_first=True) for source, width in zip(sources, outputs, strict=True)
        )
        self.double()
        self.pairs = [(self.embedding.weight, like.embedding.weight)]
        for own, other in zip(self.layers, like.layers, strict=True):
            self.pairs += [
                (own.weight_ih_l0, other.weight_input),
                (own.weight_hh_l0, other.weight_recurrent_raw),
                (own.bias_ih_l0, other.bias_input),
                (own.bias_hh_l0, other.bias_recurrent),
            ]
        with torch.no_grad():
            for own, other in self.pairs:
                own.copy_(other)

    def forward(self, ids: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        values, outputs, carried = self.embedding(ids), [], []
        for layer in self.layers:
            values, (state, cell) = layer(values)
            outputs.append(values)
            carried += [state[0], cell[0]]
        return outputs, carried


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_without_dropout_it_is_a_plain_stack_in_outputs_and_gradients(layers: int) -> None:
    model = body(num_hidden_layers=layers)
    plain, ids = Plain(model), tokens()
    output = model(ids)
    expected, carried = plain(ids)
    assert torch.equal(output.hidden_states[0], model.embedding(ids))
    for found, wanted in zip(states(output), reversed(expected), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(output.undropped, expected[-1], rtol=1e-12, atol=1e-12)
    for found, wanted in zip(output.state, carried, strict=True):
        torch.testing.assert_close(found, wanted.detach(), rtol=1e-12, atol=1e-12)
    probe = torch.randn(expected[-1].shape, dtype=torch.float64)
    (states(output)[0] * probe).sum().backward()
    (expected[-1] * probe).sum().backward()
    for own, other in plain.pairs:
        torch.testing.assert_close(other.grad, own.grad, rtol=1e-10, atol=1e-12)


def test_two_halves_with_carried_state_are_one_whole_pass() -> None:
    model, ids = body(), tokens()
    whole = model(ids)
    first = model(ids[:, :3])
    second = model(ids[:, 3:], state=first.state)
    for layer in range(3):
        joined = torch.cat([states(first)[layer], states(second)[layer]], dim=1)
        torch.testing.assert_close(joined, states(whole)[layer], rtol=1e-12, atol=1e-12)
    for found, wanted in zip(second.state, whole.state, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
        assert not found.requires_grad


def test_a_batch_can_be_cut_with_what_it_carries() -> None:
    model, ids = body(), tokens()
    carried = model(ids).state
    whole = model(ids, state=carried).last_hidden_state
    part = model(ids[1:], state=tuple(state[1:] for state in carried)).last_hidden_state
    torch.testing.assert_close(part, whole[1:], rtol=1e-12, atol=1e-12)


def zeros(batch: int) -> tuple[Tensor, ...]:
    return tuple(torch.zeros(batch, width).double() for width in (7, 7, 7, 7, 6, 6))


def test_starting_afresh_is_starting_from_zeros() -> None:
    model, ids = body(), tokens()
    start = zeros(BATCH)
    assert [list(state.shape) for state in model(ids).state] == [list(state.shape) for state in start]
    assert torch.equal(model(ids).undropped, model(ids, state=start).undropped)


def test_output_dropout_is_one_mask_for_all_times() -> None:
    model = body(dropout=0.4)
    output = model(tokens(batch=40))
    ratio = states(output)[0] / output.undropped
    torch.testing.assert_close(ratio, ratio[:, :1].expand_as(ratio), rtol=1e-12, atol=0)
    kept = ratio[:, 0] > 0
    torch.testing.assert_close(ratio[:, 0][kept], torch.full((int(kept.sum()),), 1 / 0.6).double())
    # 240 draws of 0.6: four standard errors.
    assert abs(kept.double().mean() - 0.6) < 0.13
    assert not torch.equal(kept[0], kept[1])


def test_hidden_dropout_is_locked_and_is_what_the_next_layer_reads() -> None:
    # The first layer is the same with and without dropout, so what it gives before its mask is known.
    ids = tokens(batch=20)
    dropped, plain = body(dropout_hidden=0.5)(ids), body()(ids)
    ratio = states(dropped)[2] / states(plain)[2]
    torch.testing.assert_close(ratio, ratio[:, :1].expand_as(ratio), rtol=1e-10, atol=0)
    assert set(ratio.round(decimals=9).unique().tolist()) == {0.0, 2.0}
    model = body()
    again, *_ = model.layers[1](states(dropped)[2].transpose(0, 1), *zeros(20)[2:4])
    ratio = states(dropped)[1] / again.transpose(0, 1)
    assert set(ratio.round(decimals=9).unique().tolist()) == {0.0, 2.0}


def test_input_dropout_is_one_mask_for_all_times() -> None:
    ratio = fed_to_first_layer(body(dropout_input=0.5), tokens()) / body().embedding(tokens())
    assert set(ratio.round(decimals=9).unique().tolist()) == {0.0, 2.0}
    assert torch.equal(ratio.round(decimals=9), ratio[:, :1].expand_as(ratio).round(decimals=9))


def test_embedding_dropout_drops_a_word_at_all_its_places() -> None:
    ids = tokens(batch=10)
    model = body(dropout_embedding=0.5)
    ratio = fed_to_first_layer(model, ids) / model.embedding.weight.detach()[ids]
    factor = {}
    for word, value in zip(ids.flatten().tolist(), ratio.flatten(0, 1), strict=True):
        assert torch.all((value - value[0]).abs() < 1e-9)
        assert abs(factor.setdefault(word, float(value[0])) - float(value[0])) < 1e-9
    assert {round(value, 9) for value in factor.values()} == {0.0, 2.0}


def fed_to_first_layer(model: AwdLstmModel, ids: Tensor) -> Tensor:
    """[batch, time, embedding]"""
    seen: list[Tensor] = []
    hook = model.layers[0].register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    model(ids)
    hook.remove()
    return seen[0].detach().transpose(0, 1)


def test_a_dropped_word_has_no_gradient() -> None:
    model, ids = body(dropout_embedding=0.5), tokens(batch=10)
    model(ids).undropped.square().sum().backward()
    gradient = model.embedding.weight.grad
    assert gradient is not None
    touched = gradient.abs().sum(1) > 0
    assert 0 < int(touched.sum()) < len(ids.unique())


def test_weight_drop_draws_one_mask_a_call_and_its_gradient_reaches_kept_weights_alone() -> None:
    torch.manual_seed(0)
    layer = LstmLayer(4, 5, weight_drop=0.5).double()
    for parameter in layer.parameters():
        nn.init.uniform_(parameter, -0.4, 0.4)
    inputs, state = torch.randn(6, 2, 4).double(), torch.randn(2, 5).double()
    torch.manual_seed(3)
    used = layer.weights()[1].detach()
    raw = layer.weight_recurrent_raw
    kept = used != 0
    torch.testing.assert_close(used[kept], 2 * raw.detach()[kept])
    assert 0.3 < kept.double().mean() < 0.7
    torch.manual_seed(3)
    outputs, *_ = layer(inputs, state, state)
    outputs.square().sum().backward()
    assert raw.grad is not None
    assert torch.equal(raw.grad != 0, kept)
    # The mask of the forward pass is the one that the outputs were made with.
    plain = nn.LSTM(4, 5).double()
    with torch.no_grad():
        weights = (layer.weight_input, used, layer.bias_input, layer.bias_recurrent)
        for own, value in zip(plain.parameters(), weights, strict=True):
            own.copy_(value)
    expected, _ = plain(inputs, (state[None], state[None]))
    torch.testing.assert_close(outputs, expected, rtol=1e-12, atol=1e-12)
    plain_loss = expected.square().sum()
    plain_loss.backward()
    torch.testing.assert_close(raw.grad, plain.weight_hh_l0.grad * kept * 2)
    assert not torch.equal(layer(inputs, state, state)[0], outputs)


def test_eval_mode_has_no_masks_and_draws_no_numbers() -> None:
    model, ids = body(**dict.fromkeys(DROPOUTS, 0.5)), tokens()
    plain = body()
    model.load_state_dict(plain.state_dict())
    model.eval()
    before = torch.get_rng_state()
    assert torch.equal(model(ids).last_hidden_state, plain(ids).undropped)
    assert torch.equal(torch.get_rng_state(), before)


def test_gradients_in_eval_mode_are_those_of_no_dropout() -> None:
    model, plain, ids = body(**dict.fromkeys(DROPOUTS, 0.5)), body(), tokens()
    model.eval()
    for one in (model, plain):
        one(ids).last_hidden_state.square().sum().backward()
    for own, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(own.grad, other.grad, rtol=1e-12, atol=0)


def test_one_seed_gives_one_result_to_the_bit() -> None:
    results = []
    for _ in range(2):
        model, ids = body(**dict.fromkeys(DROPOUTS, 0.3)).float(), tokens()
        torch.manual_seed(5)
        model(ids).last_hidden_state.square().sum().backward()
        results.append([parameter.grad for parameter in model.parameters()])
    for one, two in zip(*results, strict=True):
        assert one is not None
        assert torch.equal(one, two)


def test_state_dict_holds_the_raw_weights() -> None:
    model = body(weight_drop=0.5)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model(tokens())
    after = model.state_dict()
    assert sum(name.endswith("_raw") for name in after) == 3
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_embedding_starts_within_a_tenth() -> None:
    weight = body(vocab_size=200, embedding_size=50).float().embedding.weight
    assert weight.abs().max() <= 0.1
    assert abs(weight.std() - 0.2 / 12**0.5) < 1e-3


def test_autocast_keeps_the_recurrence_and_what_is_carried_in_fp32() -> None:
    model, ids = body(**dict.fromkeys(DROPOUTS, 0.2)).float(), tokens()
    with torch.autocast("cpu", torch.bfloat16):
        first = model(ids)
        second = model(ids, state=first.state)
    assert {state.dtype for state in (*second.state, *states(second))} == {torch.float32}
    states(second)[0].square().sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_torchs_settings_are_left_as_they_were() -> None:
    before = torch.backends.mkldnn.enabled
    with pytest.raises(RuntimeError):
        body().layers[0](torch.zeros(2, 3, EMBEDDING + 1), *torch.zeros(2, 3, HIDDEN))
    body()(tokens())
    assert torch.backends.mkldnn.enabled == before


def test_carried_states_of_another_batch_are_refused() -> None:
    model = body()
    carried = model(tokens(batch=2)).state
    with pytest.raises(FullrankError, match=r"carried states have shapes \[\[2, 7\].*start afresh"):
        model(tokens(batch=3), state=carried)


@pytest.mark.parametrize("name", DROPOUTS)
def test_an_impossible_dropout_is_refused(name: str) -> None:
    with pytest.raises(FullrankError, match=f"{name}=1.0 is impossible"):
        body(**{name: 1.0})


def test_padding_before_text_is_refused_and_after_it_changes_nothing() -> None:
    model, ids = body().eval(), tokens()
    mask = torch.ones(BATCH, TIME, dtype=torch.long)
    mask[1, 5:] = 0
    assert torch.equal(model(ids, attention_mask=mask).last_hidden_state, model(ids).last_hidden_state)
    with pytest.raises(FullrankError, match="padding_side='right'"):
        model(ids, attention_mask=mask.flip(1))
    with pytest.raises(FullrankError, match="either input_ids or inputs_embeds"):
        model()


def test_embedded_inputs_are_ids() -> None:
    model, ids = body(), tokens()
    found = model(inputs_embeds=model.embedding(ids))
    assert torch.equal(found.last_hidden_state, model(ids).last_hidden_state)


def test_numbers_that_version_0_1_gave() -> None:
    """Weights by a formula, a text in two parts; computed with the class of version 0.1."""
    model = body()
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            wave = torch.sin(0.7 * torch.arange(parameter.numel()).double() + number)
            parameter.copy_(wave.view_as(parameter))
    text = (5 * torch.arange(BATCH * TIME) % V).view(BATCH, TIME)
    output = model(text.flip(1), state=model(text).state)
    found = [output.last_hidden_state.sum(), states(output)[1].square().sum(), output.state[5].sum()]
    expected = torch.tensor([-17.09189727487327, 7.336657642011382, -1.9322444896052733], dtype=torch.float64)
    torch.testing.assert_close(torch.stack(found), expected, rtol=1e-12, atol=0)


def whole(head: str = "softmax", *, width: int = EMBEDDING, **options: Any) -> FullrankForCausalLM:
    torch.manual_seed(0)
    made = {"name": head, "hidden": LAST, "width": width, **options}
    model = FullrankForCausalLM(
        FullrankConfig(body=AwdLstmConfig(**SIZES), head=made, tie_word_embeddings=True)
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0)
    return model.eval()


def test_a_head_of_another_width_is_tied() -> None:
    model = whole()
    assert model.lm_head.decoder.weight is model.model.embedding.weight
    assert model.lm_head.width == EMBEDDING != LAST


@pytest.mark.parametrize(
    ("head", "options"),
    [("mos", {"components": 3}), ("doc", {"layers": ((LAST, 2), (HIDDEN, 1))}), ("pointer", {})],
)
def test_saved_and_loaded_it_is_the_same_to_the_bit(
    head: str, options: dict[str, Any], tmp_path: Path
) -> None:
    model = whole(head, **options)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert isinstance(again.model, AwdLstmModel)
    assert again.lm_head.decoder.weight is again.model.embedding.weight
    with torch.no_grad():
        assert torch.equal(again(tokens()).logits, model(tokens()).logits)


@pytest.mark.parametrize("head", ["mos", "pointer"])
def test_generate_carries_the_state(head: str) -> None:
    """Greedy tokens are those of reading all again; with a state every step but the first reads one token."""
    model, ids = whole(head), tokens(batch=2, time=3)
    read: list[int] = []
    model.model.register_forward_pre_hook(
        lambda module, given, named: read.append(named["input_ids"].shape[1]), with_kwargs=True
    )
    found = model.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0)
    assert read == ([3, 1, 1, 1, 1, 1] if head == "mos" else [3, 4, 5, 6, 7, 8])
    expected = ids
    for _ in range(6):
        with torch.no_grad():
            expected = torch.cat([expected, model(expected).logits[:, -1:].argmax(-1)], dim=1)
    assert torch.equal(found, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("autocast", [False, True])
def test_on_a_gpu_cudnn_takes_the_weights_without_a_warning_and_agrees(autocast: bool) -> None:
    # Warnings are errors here, so that scattered weights would show.
    model, ids = body(inner_size=70, hidden_size=30, embedding_size=20).float(), tokens()
    expected = model(ids)
    expected.undropped.square().sum().backward()
    wanted = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    model.cuda()
    with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        found = model(ids.cuda())
    found.undropped.square().sum().backward()
    assert found.undropped.dtype == torch.float32
    torch.testing.assert_close(found.undropped.cpu(), expected.undropped, rtol=1e-2, atol=1e-3)
    for parameter, value in zip(model.parameters(), wanted, strict=True):
        torch.testing.assert_close(
            parameter.grad.cpu(), value, rtol=2e-2, atol=2e-2 * float(value.abs().max())
        )
    # Dropped weights while training, a gradient in eval mode, and no gradient at all.
    dropping = body(**dict.fromkeys(DROPOUTS, 0.5)).float().cuda()
    dropping(ids.cuda()).undropped.sum().backward()
    dropping.eval()
    dropping(ids.cuda()).undropped.sum().backward()
    with torch.no_grad():
        dropping(ids.cuda())
