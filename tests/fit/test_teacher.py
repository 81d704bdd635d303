"""Heads fitted to a teacher: the objective is the KL written out, and what is found is what was planted."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from fullrank.errors import FullrankError
from fullrank.fit import comparison, states
from fullrank.fit.comparison import Comparison, Settings, compare, setting_for
from fullrank.fit.setting import Setting
from fullrank.fit.teacher import Teacher
from fullrank.fit.trainee import Trainee
from fullrank.heads import Head
from tests.fit.planted import planted_head, softmax_over, split_parts, student_of

D, V, TIME = 6, 30, 32
QUICK = Settings(seeds=1, rates=(0.12, 0.5), epochs=16)


def parts_of(windows: int, width: int = D, *, seed: int = 0) -> states.Parts:
    """Random states, and a text that is independent of every head."""
    hidden = torch.randn(windows, TIME, width, generator=torch.Generator().manual_seed(seed))
    targets = torch.randint(12, (windows, TIME), generator=torch.Generator().manual_seed(9))
    return split_parts(targets, hidden)


def compared(taught_by: Head, *, settings: Settings = QUICK, windows: int = 70) -> Comparison:
    """A mixture of two and its controls, on the teacher's states and over a copy of its matrix."""
    parts = parts_of(windows)
    plain = softmax_over(taught_by.decoder.weight)
    students = {"mos": student_of(plain, components=2)}
    teacher = Teacher(head=taught_by, parts=parts, vocab=V)
    setting = setting_for(list(students.values()), plain, parts, settings, teacher)
    return compare(setting, students, settings=settings)


def other_softmax() -> Head:
    return softmax_over(planted_head(D, V, 1, generator=torch.Generator().manual_seed(5)).decoder.weight)


def mean(values: Tensor | None) -> float:
    assert values is not None
    return float(values.double().mean())


def written_out(trainee: Trainee, teacher: Teacher, setting: Setting, chosen: Tensor) -> Tensor:
    """KL(teacher || head) of chosen tokens, with all tables, in fp64."""
    head = trainee.double().head
    weight, bias = trainee.whole_matrix()
    rows, log_prior = trainee._rows(
        [state.flatten(0, 1)[chosen].double() for state in setting.parts.fit.states]
    )
    scores = rows @ weight.T + (0.0 if bias is None else bias)
    joint = head.pointwise(scores).log_softmax(-1) + log_prior[..., None]
    log_p = joint.logsumexp(1)
    teacher_states = [state.flatten(0, 1)[chosen].double() for state in teacher.parts.fit.states]
    log_q = teacher.head.double()(teacher_states)[:, :V].log_softmax(-1)
    teacher.head.float()
    # The teacher gives no probability to tokens for which it has no rows.
    return (log_q.exp() * (log_q - log_p[:, : log_q.shape[1]])).sum(1).mean()


@pytest.mark.parametrize("rows", [None, V])
@pytest.mark.parametrize(
    ("components", "softcap", "bias", "vocab"),
    [(3, None, False, V), (1, 3.0, True, V), (1, None, False, V + 7), (2, None, True, V - 5)],
)
def test_the_objective_and_its_gradient_are_the_kl_written_out(
    rows: int | None, components: int, softcap: float | None, bias: bool, vocab: int
) -> None:
    taught_by = planted_head(9, vocab, components, bias=bias)
    if bias:
        torch.nn.init.normal_(taught_by.decoder.bias)
    if softcap is not None:
        taught_by.cap_scores(softcap)
    parts, plain = parts_of(9), other_softmax()
    teacher = Teacher(head=taught_by, parts=parts_of(9, 9, seed=1), vocab=V)
    student = student_of(plain, components=2)
    # With all rows kept the estimated normaliser is exact.
    settings = dataclasses.replace(QUICK, exact=rows is None, rows=rows or 1)
    setting = setting_for([student], plain, parts, settings, teacher)
    trainee = Trainee(student, setting, 0)
    with torch.no_grad():
        for _, parameter in trainee.own():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(7)))
    chosen = torch.arange(0, 100, 3)
    loss = trainee.loss(chosen)
    loss.backward()
    gradients = {name: weight.grad.clone() for name, weight in trainee.trained() if weight.grad is not None}
    trainee.zero_grad()
    expected = written_out(trainee, teacher, setting, chosen)
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert loss.item() > 0.1
    assert "matrix" in gradients
    for name, weight in trainee.trained():
        assert weight.grad is not None
        torch.testing.assert_close(gradients[name].double(), weight.grad.double(), rtol=1e-3, atol=1e-6)


def test_few_rows_estimate_the_kl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison, "SMALL_VOCABULARY", 0)
    taught_by, parts = planted_head(D, V, 2), parts_of(21)
    plain = other_softmax()
    teacher = Teacher(head=taught_by, parts=parts, vocab=V)
    settings = dataclasses.replace(QUICK, rows=16)
    setting = setting_for([plain], plain, parts, settings, teacher)
    assert setting.rows == 16
    exact = setting_for([plain], plain, parts, dataclasses.replace(settings, exact=True), teacher)
    estimated = Trainee(plain, setting, 0).choose_loss()
    assert estimated == pytest.approx(Trainee(plain, exact, 0).choose_loss(), rel=0.03)


def test_the_estimate_holds_where_a_student_has_followed_its_teacher() -> None:
    taught_by, parts = planted_head(D, V, 2), parts_of(70)
    plain = softmax_over(taught_by.decoder.weight)
    teacher = Teacher(head=taught_by, parts=parts, vocab=V)
    student = student_of(plain, components=2)
    settings = dataclasses.replace(QUICK, exact=False, rows=14)
    trainee = Trainee(student, setting_for([student], plain, parts, settings, teacher), 0)
    assert trainee.choose_loss() > 1.0
    trainee.head.load_state_dict(taught_by.state_dict())
    # The student is now the teacher; at the start half of its mass was elsewhere.
    assert mean(trainee.exact_divergences()) < 1e-6
    assert abs(trainee.choose_loss()) < 0.02


@pytest.mark.slow(reason="the fits of a mixture and its controls, six seconds")
def test_a_mixture_comes_nearer_to_a_mixture_than_any_softmax() -> None:
    found = compared(planted_head(D, V, 2))
    mos = mean(found.fits["mos"][0].divergences)
    assert mos < 0.5 * min(mean(found.fits[name][0].divergences) for name in ("softmax", "softmax_equal"))
    assert found.gain("mos").low > 0.02
    assert found.control in ("softmax", "softmax_equal")
    assert found.split_gain is not None
    assert found.split_gain.low > 0


def test_nothing_is_gained_from_a_teacher_that_a_softmax_can_follow() -> None:
    taught_by = planted_head(D, V, 1)
    with torch.no_grad():
        moved = taught_by.contexts.differences[0].weight
        moved.copy_(0.1 * torch.randn(D, D, generator=torch.Generator().manual_seed(2)))
    found = compared(taught_by, windows=42, settings=dataclasses.replace(QUICK, epochs=60))
    assert mean(found.original_divergences) > 0.02
    assert mean(found.fits["softmax"][0].divergences) < 1e-3
    # Which sign a gain of 1e-9 has is the processor's; an upgrade calls less than 5e-5 nothing.
    assert found.gain("mos").low < 1e-6
    assert abs(found.gain("mos").value) < 5e-5


def test_a_head_that_is_its_own_teacher_has_nothing_to_learn() -> None:
    taught_by = planted_head(D, V, 1)
    parts, plain = parts_of(14), softmax_over(taught_by.decoder.weight)
    teacher = Teacher(head=taught_by, parts=parts, vocab=V)
    trainee = Trainee(plain, setting_for([plain], plain, parts, QUICK, teacher), 0)
    divergences = trainee.exact_divergences()
    assert divergences is not None
    assert 0.0 <= float(divergences.max()) < 1e-5
    assert abs(trainee.choose_loss()) < 1e-6
    # The loss on the text, which is independent of the teacher, is not small.
    assert mean(trainee.exact_losses(parts.held_out)) > math.log(V)


def test_a_head_without_rows_is_refused_as_a_student() -> None:
    parts, plain = parts_of(14), other_softmax()
    teacher = Teacher(head=planted_head(D, V, 1), parts=parts, vocab=V)
    with pytest.raises(FullrankError, match="such as mos"):
        setting_for([student_of(plain, "pointer")], plain, parts, QUICK, teacher)
