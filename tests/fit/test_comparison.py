"""Training on frozen states: a teacher whose head is known decides what may be gained."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from fullrank.errors import FullrankError
from fullrank.fit import comparison as fit
from fullrank.fit import controls, states, training
from fullrank.fit.setting import prepare
from fullrank.fit.trainee import Trainee
from fullrank.heads import HEADS, Head, build
from fullrank.results.upgrade import TrainingText
from fullrank.upgrade import choose

D, V = 8, 60
TIME, WINDOWS = 32, 112
FACTS = TrainingText(
    sources=("made up",), sha256="", window=TIME + 1, fit_tokens=0, choose_tokens=0, held_out_tokens=0
)
QUICK = fit.Settings(seeds=3, rates=(0.5,), epochs=10)


def teacher(mixture: bool) -> tuple[Head, Tensor]:
    """A head over W, and states [windows, time, D]; the mixture's second component says the opposite."""
    generator = torch.Generator().manual_seed(3)
    head = build("mos", hidden=D, vocab=V, components=2 if mixture else 1, centred=False)
    with torch.no_grad():
        head.decoder.weight.normal_(std=0.8, generator=generator)
        if mixture:
            head.contexts.gate.weight.normal_(std=0.5, generator=generator)
            head.contexts.differences[0].weight[D:] = -2.0 * torch.eye(D)
    return head, torch.randn(WINDOWS, TIME, D, generator=generator)


def text_of(head: Head, hidden: Tensor, *more: Tensor) -> fit.Text:
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        targets = torch.multinomial(head(hidden).flatten(0, 1).exp(), 1, generator=generator).view(
            hidden.shape[:2]
        )
    blocks = torch.arange(len(hidden))[:, None].expand(hidden.shape[:2])
    whole = states.Part(states=(hidden, *more), targets=targets, ids=targets.roll(1, dims=1), blocks=blocks)
    return fit.Text(parts=states.split(whole), facts=FACTS)


def plain_of(head: Head) -> Head:
    plain = build("softmax", hidden=D, vocab=V)
    plain.decoder.weight = torch.nn.Parameter(head.decoder.weight.detach().clone())
    return plain


def student_of(plain: Head, name: str, **options: Any) -> Head:
    if "centred" in HEADS[name].options():
        # As an upgrade builds it.
        options["centred"] = False
    head = build(name, hidden=D, vocab=V, **options)
    head.decoder.weight = plain.decoder.weight
    return head


@pytest.fixture(scope="module")
def mixture() -> tuple[Head, fit.Text]:
    head, hidden = teacher(True)
    return plain_of(head), text_of(head, hidden)


@pytest.fixture(scope="module")
def softmax() -> tuple[Head, fit.Text]:
    head, hidden = teacher(False)
    return plain_of(head), text_of(head, hidden)


def test_a_mixture_beats_both_controls_where_the_truth_is_a_mixture(mixture: tuple[Head, fit.Text]) -> None:
    plain, text = mixture
    record, _ = fit.fit_head(student_of(plain, "mos", components=2), plain, text, settings=QUICK)
    assert [one.head for one in record.fits] == ["softmax", "softmax_equal", "mos"]
    softmax, equal, mos = record.fits
    # All start as the original, exactly, and are judged on the same tokens.
    assert softmax.before.value == pytest.approx(equal.before.value, abs=1e-6)
    assert mos.before.value == pytest.approx(softmax.before.value, abs=1e-6)
    assert all(one.after.value < one.before.value for one in record.fits)
    assert equal.parameters == pytest.approx(mos.parameters, rel=0.1)
    assert record.gain.low > 0.02
    better = min(softmax.after.value, equal.after.value)
    assert record.gain.value == pytest.approx(better - mos.after.value, abs=1e-6)
    assert min(record.gain_by_seed) > 0
    assert fit.worth_it(record)
    assert "gained" in fit.verdict("mos", record)


def test_no_gain_is_claimed_where_the_truth_is_a_softmax(softmax: tuple[Head, fit.Text]) -> None:
    plain, text = softmax
    record, _ = fit.fit_head(student_of(plain, "mos", components=2), plain, text, settings=QUICK)
    # The start is the truth: whatever training does can only lose.
    assert record.gain.low <= 0
    assert abs(record.gain.value) < 0.01
    assert not fit.worth_it(record)
    assert "gained" not in fit.verdict("mos", record)


@pytest.mark.parametrize(
    ("name", "options"),
    [("mos", {"components": 2}), ("sigsoftmax", {"bias": True}), ("plif", {"limit": 40.0}), ("trunk", {})],
)
def test_estimated_losses_agree_with_exact_ones(
    mixture: tuple[Head, fit.Text], name: str, options: dict[str, Any]
) -> None:
    plain, text = mixture
    head = student_of(plain, name, **options)
    if name == "sigsoftmax":
        torch.nn.init.constant_(head.decoder.bias, 30.0)
    common: Any = {"rows": 20, "matrix": True, "limit": 1 << 24, "seed": 0}
    # The windows that are trained on hold every token of so small a vocabulary: half of them are hidden here.
    few = dataclasses.replace(text.parts, fit=text.parts.fit.windows(slice(0, 1)))
    sampled = prepare(plain, few, exact=False, **common)
    assert sampled.rows < V
    trainee = Trainee(head, sampled, 0)
    with torch.no_grad():
        for _, parameter in trainee.trained():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
        everything = torch.arange(len(few.choose))
        estimated = trainee.batch_losses(False, everything)
        exact = trainee.exact_losses(few.choose)
    assert estimated.mean().item() == pytest.approx(exact.mean().item(), abs=0.01)
    # What is written into a head is what was judged: rows, maps, offsets and all.
    target = student_of(plain, name, **options)
    trainee.into(target)
    assert target.decoder.weight is not plain.decoder.weight
    written = target(list(few.choose.states[:1]), few.choose.targets, reduction="none")
    torch.testing.assert_close(written.flatten(), exact, atol=2e-5, rtol=1e-5)


@pytest.mark.slow(reason="two more trainings, five seconds")
def test_a_head_with_a_bias_is_held_against_one_with_a_bias(mixture: tuple[Head, fit.Text]) -> None:
    plain, text = mixture
    head = student_of(plain, "sigsoftmax", bias=True)
    torch.nn.init.constant_(head.decoder.bias, 30.0)
    for name, control in controls.controls(head, plain).items():
        assert (control.decoder.bias is None) == (name == "softmax")
        assert control.decoder.weight is plain.decoder.weight
    # Far above zero sigsoftmax is softmax: with a map and a bias in both, none can be ahead.
    record, _ = fit.fit_head(head, plain, text, settings=QUICK)
    assert record.fits[1].parameters >= record.fits[2].parameters == V
    assert not fit.worth_it(record)


def test_a_tied_matrix_can_stay_as_it_is(mixture: tuple[Head, fit.Text]) -> None:
    plain, text = mixture
    head = student_of(plain, "mos", components=3)
    before = plain.decoder.weight.detach().clone()
    quick = dataclasses.replace(QUICK, matrix=False, seeds=1, epochs=2)
    record, trainee = fit.fit_head(head, plain, text, settings=quick, tied=True)
    trainee.into(head)
    assert not record.untied
    assert record.rows == 0
    assert head.decoder.weight is plain.decoder.weight
    assert torch.equal(before, plain.decoder.weight)
    held_out = text.parts.held_out
    loss = head(list(held_out.states), held_out.targets)
    assert loss.item() == pytest.approx(record.saved_loss, abs=1e-5)
    assert record.saved_loss < record.fits[-1].before.value


def test_heads_that_read_layers_positions_and_ids_train_too() -> None:
    truth, hidden = teacher(True)
    text = text_of(truth, hidden[:21], 3.0 * hidden[:21].flip(-1))
    plain = plain_of(truth)
    quick = dataclasses.replace(QUICK, seeds=1, epochs=2, rates=(0.12,))
    wide = {"doc": {"layers": ((D, 2), (D, 1))}, "facets": {"layers": 2, "positions": 2}, "pointer": {}}
    for name, options in wide.items():
        head = student_of(plain, name, **options)
        record, trainee = fit.fit_head(head, plain, text, settings=quick)
        assert record.exact
        assert record.fits[-1].before.value == pytest.approx(record.fits[0].before.value, abs=1e-3)
        trainee.into(head)
        held_out = text.parts.held_out
        loss = head(list(held_out.states[: head.states]), held_out.targets, context=held_out.ids)
        assert loss.item() == pytest.approx(record.saved_loss, abs=1e-5)


@pytest.mark.slow(
    reason="trains every head of auto, nine seconds; the command's auto is tested by its choice"
)
def test_choosing_takes_what_is_best_and_judging_declines(
    mixture: tuple[Head, fit.Text], softmax: tuple[Head, fit.Text]
) -> None:
    quick = dataclasses.replace(QUICK, seeds=2)
    for (plain, text), worth in ((mixture, True), (softmax, False)):
        heads = {name: student_of(plain, name) for name in ("plif", "mos")}
        best, tried = choose.choose_head(heads, plain, text, settings=quick, refused={"moss": "soft cap"})
        assert [one.head for one in tried] == ["plif", "mos", "moss"]
        assert math.isnan(tried[-1].choose_loss)
        assert best == max(tried[:2], key=lambda one: one.control_loss - one.choose_loss).head
        record, _ = fit.fit_head(heads[best], plain, text, settings=quick)
        assert fit.worth_it(record) == worth
        assert best == "mos" or not worth


def test_training_ends_when_nothing_is_gained(softmax: tuple[Head, fit.Text]) -> None:
    plain, text = softmax
    head = student_of(plain, "mos", components=2)
    setting = prepare(plain, text.parts, rows=V, exact=True, matrix=True, limit=1 << 24, seed=0)
    # Far too fast: every pass does harm, and the start is what is kept.
    fitted, _trainee = training.train(setting, head, rates=(50.0,), epochs=6, patience=2, seed=0)
    assert fitted.steps == 0
    start = head(list(text.parts.held_out.states), text.parts.held_out.targets).item()
    assert fitted.losses.mean().item() == pytest.approx(start, abs=1e-5)


def test_what_cannot_be_trained_is_refused(softmax: tuple[Head, fit.Text]) -> None:
    plain, text = softmax
    with pytest.raises(FullrankError, match="held against"):
        fit.fit_head(plain, plain, text, settings=QUICK)
    whole = text.parts.fit
    with pytest.raises(FullrankError, match="too few"):
        states.split(whole.windows(slice(0, 2)))
    dead = states.Part(
        states=(torch.zeros_like(whole.states[0]),), targets=whole.targets, ids=whole.ids, blocks=whole.blocks
    )
    with pytest.raises(FullrankError, match="zero"):
        prepare(plain, states.split(dead), rows=V, exact=True, matrix=True, limit=1 << 24, seed=0)
