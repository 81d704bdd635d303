"""The estimated normaliser against the exact one: at the start, after a move, with nothing left out."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from fullrank.errors import FullrankError
from fullrank.fit import sampling
from fullrank.fit.setting import Setting, layer_of, prepare
from fullrank.fit.states import Part, Parts
from fullrank.fit.trainee import Trainee
from fullrank.heads import Head, build
from fullrank.models.output_layer import OutputLayer

CAP = 3.0
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bias": {"bias": True},
    "capped": {"cap": CAP},
    "both": {"bias": True, "cap": CAP},
}


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def plain_layer(
    V: int = 200, D: int = 12, *, bias: bool = False, cap: float | None = None, size: float = 0.5
) -> Head:
    head = build("softmax", hidden=D, vocab=V, bias=bias)
    with torch.no_grad():
        head.decoder.weight.copy_(size * gaussian(V, D))
        if bias:
            head.decoder.bias.copy_(gaussian(V, seed=9))
    if cap is not None:
        head.cap_scores(cap)
    return head.requires_grad_(False)


def mixture_over(plain: Head, components: int = 2) -> Head:
    """A mixture that starts as the plain head."""
    head = build(
        "mos", hidden=plain.width, vocab=plain.vocab, components=components, centred=False,
        bias=plain.decoder.bias is not None,
    )  # fmt: skip
    head.replace_decoder(plain.decoder)
    head.softcap = plain.softcap
    return head


def part_of(hidden: Tensor, targets: Tensor) -> Part:
    """One window, in blocks of 20 tokens."""
    blocks = (torch.arange(len(targets)) // 20)[None]
    return Part(states=(hidden[None],), targets=targets[None], ids=targets[None], blocks=blocks)


def parts_of(plain: Head, counts: tuple[int, int, int] = (600, 200, 300), scale: float = 1.0) -> Parts:
    """Gaussian states, and targets from the head itself."""
    made = []
    for place, count in enumerate(counts):
        hidden = scale * gaussian(count, plain.hidden, seed=20 + place)
        draw = torch.Generator().manual_seed(30 + place)
        made.append(part_of(hidden, torch.multinomial(plain(hidden).exp(), 1, generator=draw)[:, 0]))
    return Parts(fit=made[0], choose=made[1], held_out=made[2])


def ready(plain: Head, parts: Parts, rows: int = 60, limit: int = 1 << 24) -> Setting:
    return prepare(plain, parts, rows=rows, exact=False, matrix=True, limit=limit, seed=0)


def trained_rows(setting: Setting) -> Tensor:
    assert setting.sampled is not None
    return setting.sampled[0].rows


def moved(head: Head, setting: Setting, by: float = 0.15) -> Trainee:
    """A head that is no longer where it started, in its contexts and in the rows that are trained."""
    found = Trainee(head, setting, 0)
    draw = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for _, parameter in found.trained():
            parameter += by * torch.randn(parameter.shape, generator=draw)
    return found


@pytest.mark.parametrize(
    ("kind", "components", "scale"),
    [("plain", 1, 30.0), ("plain", 2, 1.0), ("bias", 2, 30.0), ("capped", 1, 1.0), ("both", 2, 30.0)],
)
def test_the_start_is_the_model_to_the_rounding(kind: str, components: int, scale: float) -> None:
    plain = plain_layer(**KINDS[kind], size=0.5 / scale)
    setting = ready(plain, parts_of(plain, scale=scale))
    assert len(trained_rows(setting)) < plain.vocab
    head = plain if components == 1 else mixture_over(plain, components)
    found, output = Trainee(head, setting, 0), layer_of(plain)
    for fitting, part in ((True, setting.parts.fit), (False, setting.parts.choose)):
        exact = output.losses(part.states[0][0], part.targets[0])
        with torch.no_grad():
            estimated = found.batch_losses(fitting, torch.arange(len(part)))
        torch.testing.assert_close(estimated, exact, rtol=2e-5, atol=2e-5)
        torch.testing.assert_close(found.exact_losses(part), exact, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_the_estimated_normaliser_is_unbiased_after_a_move(kind: str) -> None:
    count, target = 8000, 5
    plain = plain_layer(60, 8, **KINDS[kind])
    same = part_of(gaussian(1, 8, seed=3).expand(count, 8), torch.full((count,), target))
    # One token alone occurs, so that few rows are trained and the rest is drawn, anew for every copy of it.
    setting = ready(plain, Parts(fit=same, choose=same, held_out=same), rows=20)
    assert len(trained_rows(setting)) == 20
    model = moved(plain, setting)
    with torch.no_grad():
        one = Part(
            states=(same.states[0][:, :1],), targets=same.targets[:, :1], ids=same.ids[:, :1],
            blocks=same.blocks[:, :1],
        )  # fmt: skip
        exact = model.exact_losses(one)[0]
        # The same target score stands in both, so that the ratio of Z is the ratio of exp(loss).
        ratio = (model.batch_losses(False, torch.arange(count)) - exact).double().exp()
    error = float(ratio.std()) / math.sqrt(count)
    assert float(ratio.std()) > 0.005
    assert abs(float(ratio.mean()) - 1) < 4 * error


def test_the_gradient_of_the_estimated_loss_is_the_exact_one_in_the_mean() -> None:
    copies = 600
    plain = plain_layer(50, 6)
    hidden, targets = gaussian(8, 6, seed=3), torch.arange(8)
    many = part_of(hidden.repeat(copies, 1), targets.repeat(copies))
    setting = ready(plain, Parts(fit=many, choose=many, held_out=many), rows=15)
    rows = trained_rows(setting)
    model = moved(mixture_over(plain), setting)
    assert model.matrix is not None
    model.batch_losses(False, torch.arange(len(many))).mean().backward()
    found = {name: one.grad.clone() for name, one in model.trained() if one.grad is not None}
    assert found.keys() == {name for name, _ in model.trained()}
    model.zero_grad()
    # The definition, dense: only the trained rows are parameters.
    weight = plain.decoder.weight.index_copy(0, rows, model.matrix)
    contexts, log_prior = model.head.rows([hidden])
    log_probs = torch.log_softmax(contexts @ weight.T, dim=-1)[torch.arange(8), :, targets]
    (-(log_prior + log_probs).logsumexp(dim=-1)).mean().backward()
    for name, parameter in model.trained():
        assert parameter.grad is not None
        difference = float((found[name] - parameter.grad).norm())
        assert difference < 0.03 * float(parameter.grad.norm()) + 1e-7, name


def test_draws_follow_the_start_and_spare_the_trained_rows() -> None:
    output = layer_of(plain_layer(30, 6))
    state, count = gaussian(1, 6, seed=3), 1000
    rows = torch.tensor([0, 4, 7, 20])
    found = sampling.sample(
        output, state.expand(count, 6), torch.full((count,), 7), rows, 1 << 24,
        torch.Generator().manual_seed(0),
    )  # fmt: skip
    assert found.drawn.shape == (count, sampling.POOL)
    assert not torch.isin(found.drawn, rows).any()
    assert torch.equal(rows[found.place], torch.full((count,), 7))
    logits = output.logits(state)[0]
    torch.testing.assert_close(found.scores, logits[found.drawn], rtol=1e-5, atol=1e-5)
    others = torch.ones(30, dtype=torch.bool)
    others[rows] = False
    assert float(found.normaliser[0]) == pytest.approx(float(logits[others].logsumexp(0)), rel=1e-5)
    expected = torch.softmax(logits.masked_fill(~others, -math.inf), dim=0)
    total = found.drawn.numel()
    share = torch.bincount(found.drawn.flatten(), minlength=30) / total
    assert float((share - expected).abs().max()) < 4 * math.sqrt(0.25 / total)


def test_a_step_takes_some_of_the_draws_and_other_ones_the_next_time() -> None:
    plain = plain_layer()
    sampled = ready(plain, parts_of(plain)).sampled
    assert sampled is not None
    few, other = sampled[0].fewer(), sampled[0].fewer()
    assert few.drawn.shape == (600, sampling.DRAWN)
    assert not torch.equal(few.drawn, other.drawn)
    # A draw keeps its own score.
    rows = layer_of(plain).logits(parts_of(plain).fit.states[0][0])
    torch.testing.assert_close(few.scores, rows.gather(1, few.drawn), rtol=1e-5, atol=1e-5)


def test_columns_are_drawn_from_their_rows() -> None:
    shares = torch.tensor([[0.5, 0.0, 0.5], [0.0, 1.0, 0.0], [0.1, 0.2, 0.7]])
    found = sampling.draw(shares.clone(), 20_000, torch.Generator().manual_seed(0))
    counts = torch.stack([torch.bincount(row, minlength=3) for row in found]) / 20_000
    assert float((counts - shares).abs().max()) < 4 * math.sqrt(0.25 / 20_000)
    assert torch.equal(counts == 0, shares == 0)


def test_every_target_is_trained_and_then_the_likeliest() -> None:
    plain = plain_layer(100, 6, bias=True)
    plain.decoder.bias[77] += 9
    output, hidden, targets = layer_of(plain), gaussian(50, 6), torch.arange(50) % 11 * 9
    rows = sampling.rows_to_train(output, hidden, targets, 20, 1 << 20)
    assert len(rows) == 20
    assert torch.equal(rows, rows.unique())
    assert torch.isin(targets, rows).all()
    assert 77 not in targets.tolist()
    assert 77 in rows.tolist()
    # More distinct targets than rows were asked for: all of them, and nothing else.
    assert torch.equal(sampling.rows_to_train(output, hidden, targets, 3, 1 << 20), targets.unique())
    assert torch.equal(sampling.rows_to_train(output, hidden, targets, 1000, 1 << 20), torch.arange(100))


def test_targets_outside_the_trained_rows_are_judged_too() -> None:
    plain = plain_layer(400, 8)
    setting = ready(plain, parts_of(plain, (40, 100, 100)), rows=1)
    rows, choose = trained_rows(setting), setting.parts.choose
    assert setting.sampled is not None
    assert not torch.isin(choose.targets, rows).all()
    seen = setting.sampled[1]
    assert torch.equal(seen.rows[seen.place], choose.targets.flatten())
    # Trained rows are taken from the trainee, the others from the start: with every draw the estimate is near
    # the exact loss of both together.
    model = moved(plain, setting)
    with torch.no_grad():
        estimated = model.batch_losses(False, torch.arange(len(choose)))
    gaps = estimated - model.exact_losses(choose)
    foreign = ~torch.isin(choose.targets.flatten(), rows)
    for some in (foreign, ~foreign):
        assert float(gaps[some].mean()) == pytest.approx(0, abs=0.02)
    assert float(gaps.abs().max()) > 1e-3


@pytest.mark.parametrize(("V", "kind"), [(2, "plain"), (5, "both"), (12, "plain")])
def test_vocabularies_so_small_that_no_other_rows_are_left(V: int, kind: str) -> None:
    plain = plain_layer(V, 8, **KINDS[kind])
    setting = ready(plain, parts_of(plain))
    assert len(trained_rows(setting)) == V
    model = moved(mixture_over(plain), setting)
    losses = model.batch_losses(True, torch.arange(600))
    torch.testing.assert_close(losses.detach(), model.exact_losses(setting.parts.fit), rtol=1e-4, atol=1e-4)
    losses.mean().backward()
    for name, parameter in model.trained():
        assert parameter.grad is not None, name
        assert bool(parameter.grad.isfinite().all()), name


def test_small_memory_changes_no_row_and_no_normaliser() -> None:
    plain = plain_layer(100, 6)
    parts = parts_of(plain, (200, 60, 60))
    wide, narrow = (ready(plain, parts, rows=30, limit=limit).sampled for limit in (1 << 26, 1 << 12))
    assert wide is not None
    assert narrow is not None
    assert torch.equal(wide[0].rows, narrow[0].rows)
    torch.testing.assert_close(wide[0].normaliser, narrow[0].normaliser)


def test_refusals() -> None:
    zeros = part_of(torch.zeros(10, 4), torch.zeros(10, dtype=torch.int64))
    with pytest.raises(FullrankError, match="zero"):
        ready(plain_layer(20, 4), Parts(fit=zeros, choose=zeros, held_out=zeros))
    plain = plain_layer(60, 6)
    setting = ready(plain, parts_of(plain, (60, 40, 40)), rows=1)
    with pytest.raises(FullrankError, match="pointer is not rows over one matrix"):
        Trainee(build("pointer", hidden=6, vocab=60), setting, 0)


def test_the_layer_of_a_head_is_the_head() -> None:
    for kind in KINDS.values():
        plain, hidden = plain_layer(**kind), gaussian(5, 12)
        found = layer_of(plain)
        assert isinstance(found, OutputLayer)
        torch.testing.assert_close(found.logits(hidden).log_softmax(dim=1), plain(hidden))
