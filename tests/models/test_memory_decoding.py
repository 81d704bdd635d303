"""Decoding with a memory, against loops that are written out and read the whole text at every step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from fullrank.errors import FullrankError
from fullrank.heads import Store
from fullrank.models.cache_layer import StateWithMemory
from fullrank.upgrade import upgrade
from tests import small_models

Make = Callable[..., Any]

NEW = 8
END = 0
BODIES = ["llama untied", "lstm", *(pytest.param(one, marks=pytest.mark.slow) for one in ("mamba", "rwkv"))]


@pytest.fixture
def make(tiny_model: Make) -> Make:
    """A model with a memory that outweighs its base, of states that look for others."""

    def made(body: str = "llama untied", head: str = "cache", **options: Any) -> Any:
        if body == "lstm":
            torch.manual_seed(0)
            model: Any = small_models.lstm(head, vocab=101, options={"maps": True, **options}).eval()
        else:
            model = upgrade(tiny_model(body), head, **options)
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():
            if body == "lstm":
                for parameter in model.parameters():
                    parameter.mul_(3.0)
            model.lm_head.memory_weight.fill_(2.0)
            for part in (model.lm_head.query, model.lm_head.key):
                part.weight.add_(0.3 * torch.randn(part.weight.shape, generator=generator))
        return model

    return made


@torch.no_grad()
def next_log_probs(model: Any, text: Sequence[int], allow_end: bool = False) -> Tensor:
    """[V] after a text, all of it read, without a cache or padding."""
    found = model(torch.tensor([list(text)]), use_cache=False).logits[0, -1].clone()
    if not allow_end:
        found[END] = -torch.inf
    return found


def greedy(model: Any, text: Sequence[int], new: int = NEW) -> list[int]:
    text = list(text)
    for _ in range(new):
        text.append(int(next_log_probs(model, text).argmax()))
    return text


def beam(
    model: Any, prompt: Sequence[int], beams: int, *, end: int | None = None, new: int = NEW
) -> list[int]:
    """The text of the largest sum of log-probabilities that a beam search comes upon."""
    running, ended = [(0.0, list(prompt))], []
    for _ in range(new):
        every = []
        for score, text in running:
            values, tokens = next_log_probs(model, text, end is not None).topk(2 * beams)
            every += [
                (score + value, [*text, token])
                for value, token in zip(values.tolist(), tokens.tolist(), strict=True)
            ]
        every.sort(key=lambda one: -one[0])
        # An end counts where it is among the beams; what goes on is refilled from behind.
        ended += [one for one in every[:beams] if one[1][-1] == end]
        running = [one for one in every if one[1][-1] != end][:beams]
    return max([*ended, *running], key=lambda one: one[0])[1]


def batch(texts: Sequence[Sequence[int]]) -> dict[str, Tensor]:
    """Padded on the left."""
    width = max(map(len, texts))
    return {
        "input_ids": torch.tensor([[END] * (width - len(one)) + list(one) for one in texts]),
        "attention_mask": torch.tensor([[0] * (width - len(one)) + [1] * len(one) for one in texts]),
    }


def generate(model: Any, texts: Sequence[Sequence[int]], **settings: Any) -> Any:
    settings = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False, **settings}
    return model.generate(**batch(texts), pad_token_id=END, **settings)


def texts_for(body: str, ids: Tensor) -> list[list[int]]:
    """Of different lengths where padding can be kept from the body."""
    whole = ids.tolist()
    return whole if body in ("lstm", "rwkv") else [whole[0][5:], whole[1], whole[0][:1]]


@pytest.mark.parametrize("body", BODIES)
def test_greedy_is_the_written_loop(body: str, make: Make, ids: Tensor) -> None:
    model, texts = make(body), texts_for(body, ids)
    found = generate(model, texts)
    for row, text in zip(found.tolist(), texts, strict=True):
        assert row[-NEW - len(text) :] == greedy(model, text)
    with torch.no_grad():
        model.lm_head.memory_weight.fill_(-100.0)
    assert not torch.equal(generate(model, texts), found)


@pytest.mark.parametrize("body", BODIES)
def test_beams_are_the_written_loop(body: str, make: Make, ids: Tensor) -> None:
    model, texts = make(body), texts_for(body, ids)[:2]
    found = generate(model, texts, num_beams=3)
    for row, text in zip(found.tolist(), texts, strict=True):
        assert row[-NEW - len(text) :] == beam(model, text, 3)


def test_beams_that_end_are_the_written_loop(make: Make, ids: Tensor) -> None:
    model, texts = make(), texts_for("llama", ids)[:2]
    likely = beam(model, texts[1], 3)[len(texts[1]) :]
    end = next(token for token in likely[2:] if token not in likely[:2])
    # Under a sum of log-probabilities, which only falls, transformers' early stop is exact.
    settings = {"num_beams": 3, "min_new_tokens": 0, "length_penalty": 0.0, "eos_token_id": end}
    width, lengths = max(map(len, texts)), []
    for row, text in zip(generate(model, texts, **settings).tolist(), texts, strict=True):
        expected = beam(model, text, 3, end=end)[len(text) :]
        assert row[width : width + len(expected)] == expected
        # transformers pads beams with the end where padding is token 0.
        assert set(row[width + len(expected) :]) <= {END, end}
        lengths.append(len(expected))
    assert min(lengths) < NEW


@pytest.mark.parametrize("body", BODIES)
def test_draws_have_the_probabilities_of_the_whole_text(body: str, make: Make, ids: Tensor) -> None:
    model, texts = make(body), texts_for(body, ids)
    torch.manual_seed(3)
    found = generate(
        model, texts, do_sample=True, min_new_tokens=0, eos_token_id=None,
        return_dict_in_generate=True, output_logits=True,
    )  # fmt: skip
    for row, text in enumerate(texts):
        drawn = found.sequences[row].tolist()[-NEW - len(text) :]
        for step in range(NEW):
            expected = next_log_probs(model, drawn[: len(text) + step], allow_end=True)
            torch.testing.assert_close(found.logits[step][row], expected, rtol=1e-4, atol=2e-4)
    assert len({tuple(row[-NEW:]) for row in found.sequences.tolist()}) == len(texts)


@pytest.mark.parametrize(
    ("body", "texts", "steps"),
    [("llama untied", 2, True), ("lstm", 2, True), ("rwkv", 1, True), ("rwkv", 2, False)],
)
def test_a_token_costs_one_step(body: str, texts: int, steps: bool, make: Make, ids: Tensor) -> None:
    model, read = make(body), []
    model.model.register_forward_pre_hook(
        lambda module, inputs, named: read.append(named["input_ids"].shape[1]), with_kwargs=True
    )
    scored = []
    original = model.lm_head._log_probs
    model.lm_head._log_probs = lambda states, *rest, **more: (
        scored.append(states[0].shape[1]) or original(states, *rest, **more)
    )
    generate(model, ids[:texts].tolist())
    whole = ids.shape[1]
    assert read == ([whole, *[1] * (NEW - 1)] if steps else list(range(whole, whole + NEW)))
    assert scored == [1] * NEW


@pytest.mark.parametrize("way", ["greedy", "beam"])
@pytest.mark.parametrize("body", ["llama untied", "lstm"])
def test_a_prompt_longer_than_the_memory(body: str, way: str, make: Make, ids: Tensor) -> None:
    """A window of four steps: what is older is forgotten, in steps as in the whole text."""
    model, texts = make(body, window=4), ids.tolist()
    found = generate(model, texts, num_beams=3 if way == "beam" else 1)
    for row, text in zip(found.tolist(), texts, strict=True):
        assert row == (beam(model, text, 3) if way == "beam" else greedy(model, text))
    whole = make(body)
    assert not torch.equal(generate(whole, texts, num_beams=3 if way == "beam" else 1), found)


def test_an_end_inside_a_prompt_is_a_token_like_any_other(make: Make, ids: Tensor) -> None:
    model = make()
    first, second = ids.tolist()
    first[4] = second[7] = second[-1] = END
    texts = [first[2:], second]
    for row, text in zip(generate(model, texts).tolist(), texts, strict=True):
        assert row[-NEW - len(text) :] == greedy(model, text)
    # What follows it is remembered.
    cache = model(torch.tensor([second]), use_cache=True).past_key_values
    assert cache.layers[-1].values.flatten().tolist() == second


def test_a_text_that_ends_leaves_those_beside_it_alone(make: Make, ids: Tensor) -> None:
    model, texts = make(), ids.tolist()
    alone = [greedy(model, text)[len(text) :] for text in texts]
    end = next(token for token in alone[0] if token not in alone[1])
    found = generate(model, texts, min_new_tokens=0, eos_token_id=end)[:, ids.shape[1] :].tolist()
    stop = alone[0].index(end) + 1
    assert found[0] == alone[0][:stop] + [END] * (NEW - stop)
    assert found[1] == alone[1]


def test_a_store_answers_in_steps_too(make: Make, ids: Tensor) -> None:
    model = make()
    with torch.no_grad():
        states = model.head_inputs(ids.flip(1)).states[0]
    store = Store.empty(model.lm_head.hidden)
    store.add(model.lm_head, states, context=ids.flip(1))
    without = generate(model, ids.tolist())
    model.lm_head.attach(store, neighbours=4)
    found = generate(model, ids.tolist())
    assert found.tolist() == [greedy(model, text) for text in ids.tolist()]
    assert not torch.equal(found, without)


@pytest.mark.parametrize("head", ["cache", "mos"])
def test_texts_that_nothing_follows_from_are_refused(head: str, tiny_model: Make, ids: Tensor) -> None:
    model = upgrade(tiny_model("llama untied"), head)
    with pytest.raises(FullrankError, match=r"2 texts of no token.*begin each with a token"):
        model.generate(torch.empty(2, 0, dtype=torch.long), max_new_tokens=2)
    with pytest.raises(FullrankError, match="text 1 of the batch is empty"):
        generate(model, [[5, 6], []])
    mask = torch.ones_like(ids)
    mask[1, 9:] = 0
    with pytest.raises(FullrankError, match=r"text 1 of the batch ends in padding.*padding_side='left'"):
        model.generate(ids, attention_mask=mask, max_new_tokens=2)


def test_segments_with_a_carried_state_are_the_whole_text(make: Make, ids: Tensor) -> None:
    model = make("lstm")
    with torch.no_grad():
        whole = model(ids).logits
        state, found = None, []
        for part in ids.split([4, 1, 6], dim=1):
            output = model(part, state=state, use_cache=True)
            state = output.state
            found.append(output.logits)
        torch.testing.assert_close(torch.cat(found, 1), whole, rtol=1e-4, atol=1e-4)
        assert isinstance(state, StateWithMemory)
        with pytest.raises(FullrankError, match=r"the head knows nothing of.*a state that this model"):
            model(ids, state=state.state)


@pytest.mark.parametrize("head", ["softmax", "cache"])
def test_beams_of_a_recurrent_body_carry_their_own_states(head: str, ids: Tensor) -> None:
    torch.manual_seed(1)
    model = small_models.lstm(head, vocab=101).eval()
    with torch.no_grad():
        # States that differ, so that a beam with another's is seen.
        for parameter in model.parameters():
            parameter.mul_(8.0)
    for row, text in zip(generate(model, ids.tolist(), num_beams=4).tolist(), ids.tolist(), strict=True):
        assert row == beam(model, text, 4)
