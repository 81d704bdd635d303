"""Training of a cache head in an upgrade: where the truth is a copy of the past, and beside its controls."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fullrank.errors import FullrankError
from fullrank.fit import states
from fullrank.fit.collect import Windows
from fullrank.fit.setting import prepare
from fullrank.fit.trainee import Trainee
from fullrank.heads import CacheHead, Head, build
from fullrank.results.upgrade import TrainingText
from fullrank.upgrade import run, whole
from fullrank.upgrade import training as fit
from fullrank.upgrade.upgrade import upgrade

D, V = 8, 60
FACTS = TrainingText(
    sources=("made up",), sha256="", window=33, fit_tokens=0, choose_tokens=0, held_out_tokens=0
)
QUICK = fit.Settings(seeds=1, rates=(0.12,), epochs=6)


def repeating(count: int = 70, time: int = 32) -> tuple[Head, fit.Text]:
    """Windows in which a state of each of six kinds is followed by a token that the window has drawn for it.

    The output matrix knows nothing of that: only a memory of the window can say which token follows.
    """
    generator = torch.Generator().manual_seed(3)
    kinds = torch.randn(6, D, generator=generator)
    kind = torch.randint(6, (count, time), generator=generator)
    meaning = torch.randint(V, (count, 6), generator=generator)
    targets = meaning.gather(1, kind)
    hidden = kinds[kind] + 0.1 * torch.randn(count, time, D, generator=generator)
    ids = torch.cat([torch.zeros(count, 1, dtype=torch.long), targets[:, :-1]], dim=1)
    blocks = torch.arange(count)[:, None].expand(count, time)
    part = states.Part(states=(hidden,), targets=targets, ids=ids, blocks=blocks)
    plain = build("softmax", hidden=D, vocab=V)
    torch.nn.init.normal_(plain.decoder.weight, std=0.05, generator=generator)
    return plain, fit.Text(parts=states.split(part), facts=FACTS)


def cache_over(plain: Head) -> CacheHead:
    head = build("cache", hidden=D, vocab=V, maps=True, normalised=True, memory_weight=-30.0, temperature=1.0)
    assert isinstance(head, CacheHead)
    head.decoder.weight = plain.decoder.weight
    return head


class Bare(torch.nn.Module):
    """What a training asks of a model: its head, and an embedding that is none of its matrices."""

    def __init__(self, head: Head) -> None:
        super().__init__()
        self.lm_head = head

    def get_input_embeddings(self) -> torch.nn.Embedding:
        return torch.nn.Embedding(1, 1)


@pytest.mark.parametrize("align", [pytest.param(0.0, marks=pytest.mark.slow), 1.0])
def test_a_memory_gains_where_the_truth_is_a_copy(align: float) -> None:
    plain, text = repeating()
    head = cache_over(plain)
    model = Bare(head)
    _, record = fit.fit({"cache": model}, plain, text, settings=dataclasses.replace(QUICK, align=align))
    softmax, equal, cache = record.fits
    assert [one.head for one in record.fits] == ["softmax", "softmax_equal", "cache"]
    assert cache.before.value == pytest.approx(softmax.before.value, abs=1e-3)
    assert record.gain.low > 0.3
    assert cache.after.value < min(softmax.after.value, equal.after.value) - 0.3
    assert float(head.memory_weight.detach()) > -29.0
    held_out = text.parts.held_out
    with torch.no_grad():
        loss = head(list(held_out.states), held_out.targets, context=held_out.ids)
    assert loss.item() == pytest.approx(record.saved_loss, abs=1e-5)


def test_the_ranking_loss_is_added_in_training_alone() -> None:
    plain, text = repeating(20)
    common: Any = {"rows": V, "exact": True, "matrix": False, "limit": 1 << 24, "seed": 0}
    aligned, without = (prepare(plain, text.parts, align=align, **common) for align in (1.0, 0.0))
    assert aligned.digest != without.digest
    chosen = torch.arange(3)
    head = cache_over(plain)
    with torch.no_grad():
        head.query.weight.neg_()  # every state looks for its opposite
    trainee = Trainee(head, aligned, 0)
    found = trainee.alignment(chosen)
    assert isinstance(found, torch.Tensor)
    assert found.item() > 0.1
    assert Trainee(head, without, 0).alignment(chosen) == 0.0
    assert Trainee(plain, aligned, 0).alignment(chosen) == 0.0
    plainly = Trainee(head, without, 0).batch_losses(True, chosen)
    torch.testing.assert_close(trainee.batch_losses(True, chosen), plainly)


def copies(count: int = 42, time: int = 24) -> Windows:
    """Texts whose second half is their first, as far as a body of tiny size can tell: random tokens."""
    generator = torch.Generator().manual_seed(0)
    half = torch.randint(2, 101, (count, time // 2), generator=generator)
    return Windows(
        ids=torch.cat([half, half], 1), sizes=torch.ones(count, time - 1), sources=("made up",), sha256="",
        starts_with_bos=False,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("align", [0.0, 1.0])
def test_the_whole_model_learns_with_its_memory(
    align: float, tiny_model: Callable[..., Any], tmp_path: Path
) -> None:
    original = tiny_model("llama")
    model, plain = upgrade(original, "cache"), upgrade(original, "softmax").lm_head
    before = model.lm_head.memory_weight.item()
    settings = fit.Settings(seeds=1, epochs=4, align=align)
    record = whole.fit_whole(model, plain, copies(), settings=settings, directory=tmp_path)
    assert record.unfrozen
    assert [one.head for one in record.fits] == ["softmax", "softmax_equal", "cache"]
    # Of 1e-4 of the probability a loss of 11 nats takes notice, so it starts a little lower.
    assert record.fits[2].before.value == pytest.approx(record.fits[0].before.value, abs=0.2)
    assert record.fits[2].after.value < record.fits[2].before.value
    assert model.lm_head.memory_weight.item() > before + 1.0
    held_out = copies().ids[30:]
    with torch.no_grad():
        loss = model.eval()(input_ids=held_out, labels=held_out).loss
    assert loss.item() == pytest.approx(record.saved_loss, abs=1e-4)


def test_the_loss_of_a_step_is_likelihood_and_ranking(tiny_model: Callable[..., Any]) -> None:
    model = upgrade(tiny_model("llama untied"), "cache")
    with torch.no_grad():
        model.lm_head.memory_weight.fill_(0.0)
    ids = copies().ids[:3]
    plain, twice = (whole._loss(model, ids, align) for align in (0.0, 2.0))
    assert plain.item() == pytest.approx(model(input_ids=ids, labels=ids).loss.item(), abs=1e-5)
    once = whole._loss(model, ids, 1.0)
    assert once.item() > plain.item()
    assert (twice - once).item() == pytest.approx((once - plain).item(), rel=1e-4)


def test_align_asks_for_a_cache_and_a_text() -> None:
    loaded: Any = None
    for head, files in (("mos", [Path("x")]), ("cache", [])):
        with pytest.raises(FullrankError, match=r"--align.*--head cache.*--train"):
            run.run(loaded, head, train=files, settings=fit.Settings(align=1.0))
