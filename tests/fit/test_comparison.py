"""Heads against their controls on frozen states: a teacher whose head is known decides what may be gained."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from fullrank.errors import FullrankError
from fullrank.fit import comparison, controls, states, training
from fullrank.fit.comparison import Comparison, Settings, compare, setting_for
from fullrank.fit.loop import Plan
from fullrank.fit.trainee import Trainee
from fullrank.heads import Head, build
from tests.fit.planted import draw_targets, planted_head, setting_of, softmax_over, split_parts, student_of

D, V = 8, 60
TIME, WINDOWS = 32, 112
QUICK = Settings(seeds=1, rates=(0.12, 0.5), epochs=12)

Made = tuple[Head, states.Parts]


def teacher(components: int) -> tuple[Head, Tensor]:
    """A head over W, and states [windows, time, D]."""
    generator = torch.Generator().manual_seed(3)
    head = planted_head(D, V, components, generator=generator)
    return head, torch.randn(WINDOWS, TIME, D, generator=generator)


@torch.no_grad()
def parts_of(head: Head, hidden: Tensor, *more: Tensor) -> states.Parts:
    """States, and a text drawn from the head's distributions."""
    return split_parts(draw_targets(head(hidden), torch.Generator().manual_seed(4)), hidden, *more)


def compared(made: Made, settings: Settings = QUICK, **heads: dict[str, Any]) -> Comparison:
    plain, parts = made
    students = {name: student_of(plain, name, **options) for name, options in heads.items()}
    setting = setting_for(list(students.values()), plain, parts, settings)
    return compare(setting, students, settings=settings)


def value(losses: Tensor) -> float:
    return float(losses.double().mean())


@pytest.fixture(scope="module")
def mixture() -> Made:
    head, hidden = teacher(2)
    return softmax_over(head.decoder.weight), parts_of(head, hidden)


@pytest.fixture(scope="module")
def softmax() -> Made:
    head, hidden = teacher(1)
    return softmax_over(head.decoder.weight), parts_of(head, hidden)


@pytest.fixture(scope="module")
def shifted() -> Made:
    """The text is a softmax's, but of another matrix and turned states than the model has."""
    head, hidden = teacher(1)
    generator = torch.Generator().manual_seed(5)
    other = softmax_over(head.decoder.weight)
    with torch.no_grad():
        head.decoder.weight.add_(0.5 * torch.randn(V, D, generator=generator))
        turned = torch.linalg.qr(torch.eye(D) + 0.3 * torch.randn(D, D, generator=generator)).Q
        head.decoder.weight.copy_(head.decoder.weight @ turned)
    return other, parts_of(head, hidden)


@pytest.fixture(scope="module")
def of_mixture(mixture: Made) -> Comparison:
    return compared(mixture, dataclasses.replace(QUICK, epochs=60), mos={"components": 2})


@pytest.fixture(scope="module")
def fixed_matrix() -> tuple[Made, Comparison]:
    """Two seeds of a short fit that leaves W as it is."""
    head, hidden = teacher(2)
    made = softmax_over(head.decoder.weight), parts_of(head, hidden[:70])
    settings = dataclasses.replace(QUICK, matrix=False, seeds=2, epochs=3)
    return made, compared(made, settings, mos={"components": 3})


def test_a_mixture_beats_all_controls_where_the_truth_is_a_mixture(
    mixture: Made, of_mixture: Comparison
) -> None:
    plain, parts = mixture
    truth, _ = teacher(2)
    ideal = truth(list(parts.held_out.states), parts.held_out.targets).item()
    assert list(of_mixture.fits) == ["softmax", "softmax_equal", "mos"]
    assert of_mixture.best == "mos"
    for control in ("original", "softmax", "softmax_equal"):
        assert of_mixture.gain("mos", control).low > 0.02, control
    # The default control is the best one. The fit finds most of the planted gain.
    mean = {name: value(fits[0].losses) for name, fits in of_mixture.fits.items()}
    best = min(value(of_mixture.original), *(mean[name] for name in controls.CONTROLS))
    assert of_mixture.gain("mos").value < best - mean["mos"] + 0.01
    assert ideal < mean["mos"] < ideal + 0.4 * (best - ideal)
    # The fits ended by a flat curve and not by the limit of epochs.
    assert all(of_mixture.fits[name][0].converged for name in ("softmax", "mos"))
    # The split alone gains a part of it.
    assert of_mixture.directions is not None
    assert of_mixture.directions.sure >= 1
    assert of_mixture.split_gain is not None
    assert of_mixture.split_gain.low > 0
    assert of_mixture.split_gain.value < of_mixture.gain("mos", "softmax").value + 0.01
    # The user's matrix is unchanged, the comparison's is trained.
    assert torch.equal(plain.decoder.weight, truth.decoder.weight)
    assert not torch.equal(of_mixture.setting.plain.decoder.weight, plain.decoder.weight)


def test_the_best_head_and_its_control_have_every_seed(fixed_matrix: tuple[Made, Comparison]) -> None:
    _, comparison = fixed_matrix
    seeds = {name: len(fits) for name, fits in comparison.fits.items()}
    assert comparison.control == "softmax_equal"
    assert seeds == {"softmax": 1, "softmax_equal": 2, "mos": 2}
    first, second = comparison.fits["mos"]
    assert first.rate == second.rate
    assert not torch.equal(first.losses, second.losses)
    # The weights are those of the seed with the lower loss on the validation part.
    best = min(first, second, key=lambda fit: fit.choose_loss)
    losses = comparison.fitted("mos").exact_losses(comparison.setting.parts.held_out)
    torch.testing.assert_close(losses, best.losses)


def test_a_matrix_that_is_not_trained_stays(fixed_matrix: tuple[Made, Comparison]) -> None:
    (plain, parts), comparison = fixed_matrix
    assert comparison.refit is None
    assert comparison.setting.rows == 0
    assert comparison.setting.plain is plain
    head = student_of(plain, "mos", components=3)
    comparison.fitted("mos").into(head)
    assert head.decoder.weight is plain.decoder.weight
    assert torch.equal(plain.decoder.weight, teacher(2)[0].decoder.weight)
    loss = head(list(parts.held_out.states), parts.held_out.targets).item()
    assert min(abs(loss - value(fit.losses)) for fit in comparison.fits["mos"]) < 1e-5
    assert loss < value(comparison.original) - 0.02


def test_no_gain_is_claimed_where_the_model_is_right(softmax: Made) -> None:
    result = compared(softmax, mos={"components": 2}, trunk={"components": 2})
    # The start is the truth: training can only lose.
    assert result.gain(result.best).low <= 0
    assert abs(result.gain(result.best).value) < 0.01
    assert result.refit is not None
    assert value(result.original - result.refit.losses) == pytest.approx(0, abs=0.01)
    assert result.directions is not None
    assert result.directions.sure == 0


def test_a_text_that_any_softmax_learns_is_no_gain_of_a_head(shifted: Made) -> None:
    result = compared(shifted, mos={"components": 2})
    assert result.refit is not None
    refit = value(result.original - result.refit.losses)
    assert refit > 0.2
    # All of it is the refit's: over the original layer the mixture gains as much.
    assert result.gain("mos", "original").value == pytest.approx(refit, abs=0.02)
    assert result.gain("mos").low <= 0.002
    assert abs(result.gain("mos").value) < 0.01
    assert result.control != "original"


@pytest.mark.parametrize(
    ("name", "options"),
    [("mos", {"components": 2}), ("sigsoftmax", {"bias": True}), ("plif", {"limit": 40.0}), ("trunk", {})],
)
def test_estimated_losses_agree_with_exact_ones(mixture: Made, name: str, options: dict[str, Any]) -> None:
    plain, parts = mixture
    head = student_of(plain, name, **options)
    if name == "sigsoftmax":
        torch.nn.init.constant_(head.decoder.bias, 30.0)
    # All training windows together hold every token of so small a vocabulary: use one of them.
    few = dataclasses.replace(parts, fit=parts.fit.windows(slice(0, 1)))
    sampled = setting_of(plain, few, rows=20, exact=False)
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


@pytest.mark.slow(reason="two seconds; test_sampling.py compares the estimate with the exact loss")
def test_few_rows_and_an_estimated_loss_find_the_mixture_too(mixture: Made) -> None:
    settings = dataclasses.replace(QUICK, exact=False, rows=30, rates=(0.5,))
    result = compared(mixture, settings, mos={"components": 2})
    assert result.setting.sampled is not None
    # Every token of so small a vocabulary occurs, so all rows are trained.
    assert result.setting.rows == V
    assert result.gain("mos").low > 0.02


def test_the_equal_control_of_a_head_with_a_bias_has_a_bias(mixture: Made) -> None:
    plain, _ = mixture
    head = student_of(plain, "sigsoftmax", bias=True)
    for name, control in controls.controls(head, plain).items():
        assert (control.decoder.bias is None) == (name == "softmax")
        assert control.decoder.weight is plain.decoder.weight
    assert controls.size(controls.controls(head, plain)["softmax_equal"]) >= controls.size(head)


@pytest.mark.parametrize(("width", "components"), [(64, 8), (576, 2), (576, 4)])
def test_the_equal_softmax_has_as_many_parameters_as_the_mixture(width: int, components: int) -> None:
    with torch.device("meta"):
        plain = build("softmax", hidden=width, vocab=V)
        head = build("mos", hidden=width, vocab=V, components=components, centred=False)
        equal = controls.controls(head, plain)["softmax_equal"]
    assert controls.size(equal) == pytest.approx(controls.size(head), rel=0.02)


def test_heads_that_read_layers_positions_and_ids_train_too() -> None:
    truth, hidden = teacher(2)
    parts = parts_of(truth, hidden[:14], 3.0 * hidden[:14].flip(-1))
    made = (softmax_over(truth.decoder.weight), parts)
    quick = dataclasses.replace(QUICK, epochs=3, rates=(0.12,))
    wide: dict[str, dict[str, Any]] = {
        "doc": {"layers": ((D, 2), (D, 1))}, "facets": {"layers": 2, "positions": 2}, "pointer": {},
    }  # fmt: skip
    result = compared(made, quick, **wide)
    # Not all are rows over one matrix, and all must have the same loss.
    assert result.setting.sampled is None
    assert result.refit is not None
    for name, options in wide.items():
        fitted = result.fits[name][0]
        # Each starts as the refitted layer; a pointer gives its memory a ten-thousandth at the start.
        start = Trainee(result.heads[name], result.setting, 0).exact_losses(parts.held_out)
        assert value(start) == pytest.approx(value(result.refit.losses), abs=1e-3), name
        assert fitted.choose_loss <= fitted.curve[0][1]
        assert len(fitted.curve) > 2
        head = student_of(made[0], name, **options)
        result.fitted(name).into(head)
        held_out = parts.held_out
        loss = head(list(held_out.states[: head.states]), held_out.targets, context=held_out.ids)
        assert loss.item() == pytest.approx(value(fitted.losses), abs=1e-5), name


def test_a_fit_that_only_gets_worse_returns_its_start(softmax: Made) -> None:
    plain, parts = softmax
    head = student_of(plain, "mos", components=2)
    setting = setting_of(plain, parts)
    # The rate is far too high: every epoch does harm.
    fitted, weights = training.train(setting, head, Plan(rates=(50.0,), epochs=6), seed=0)
    assert fitted.steps == 0
    start = head(list(parts.held_out.states), parts.held_out.targets).item()
    assert value(fitted.losses) == pytest.approx(start, abs=1e-5)
    assert torch.equal(weights["matrix"], plain.decoder.weight)


def test_a_fit_is_the_same_for_a_seed_and_not_for_another(mixture: Made) -> None:
    plain, parts = mixture
    setting = setting_of(plain, parts)
    head = student_of(plain, "mos", components=2)
    losses = [training.train(setting, head, Plan(rates=(0.5,), epochs=1), seed=seed)[0].losses
              for seed in (0, 0, 1)]  # fmt: skip
    assert torch.equal(losses[0], losses[1])
    assert not torch.equal(losses[0], losses[2])


def test_work_pays_for_passes(mixture: Made) -> None:
    plain, parts = mixture
    setting = setting_of(plain, parts)
    small, large = (student_of(plain, "mos", components=number) for number in (2, 4))
    epochs = [
        comparison.plan_for(setting, head, dataclasses.replace(QUICK, work=work, epochs=1000)).epochs
        for head, work in ((small, 0.0), (small, 1e10), (small, 2e10), (large, 2e10))
    ]
    assert epochs[0] == 3
    assert epochs[0] < epochs[1] < epochs[2]
    # Twice the rows cost twice as much.
    assert epochs[3] + 2 == pytest.approx((epochs[2] + 2) / 2, rel=0.15)
    assert comparison.plan_for(setting, small, QUICK).epochs == QUICK.epochs


def test_refusals(softmax: Made) -> None:
    plain, parts = softmax
    with pytest.raises(FullrankError, match="too few"):
        states.split(parts.fit.windows(slice(0, 2)))
    zeros = dataclasses.replace(parts.fit, states=(torch.zeros_like(parts.fit.states[0]),))
    with pytest.raises(FullrankError, match="zero"):
        setting_of(plain, states.split(zeros))
