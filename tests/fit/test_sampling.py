"""Fits on frozen states: the estimated normaliser against the exact one, and what a fit promises."""

import math

import pytest
import torch

from fullrank.errors import FullrankError
from fullrank.fit import frozen
from fullrank.heads.contexts import Contexts
from fullrank.models.output_layer import OutputLayer
from fullrank.ops import IDENTITY, SIGSOFTMAX, Softcap


def gaussian(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def drawn(logits, seed=0):
    """One target a row from softmax(logits)."""
    generator = torch.Generator().manual_seed(seed)
    return torch.multinomial(torch.softmax(logits, dim=1), 1, generator=generator)[:, 0]


def layer(V=200, D=12, *, bias=False, pointwise=IDENTITY, size=0.5):
    return OutputLayer(
        weight=size * gaussian(V, D),
        bias=gaussian(V, seed=9) if bias else None,
        pointwise=pointwise,
        tokens=V,
    )


def split(truth, counts=(600, 200, 300), width=None, scale=1.0):
    """Gaussian states and targets from `truth` (states -> logits), in blocks of 20 tokens."""
    parts = []
    for place, count in enumerate(counts):
        hidden = scale * gaussian(count, width, seed=20 + place)
        targets = drawn(truth(hidden), seed=30 + place)
        parts.append(frozen.Tokens(hidden=hidden, targets=targets, blocks=torch.arange(count) // 20))
    return frozen.Split(fit=parts[0], choose=parts[1], held_out=parts[2])


def ready(output, rows=60, **more):
    return frozen.setting(output, split(output.logits, width=output.width, **more), rows=rows)


def plain(D):
    return Contexts(sources=((D, 1),), width=D, as_published=False)


def mixture(D):
    return Contexts(sources=((D, 2),), width=D, as_published=False)


def start(setting, contexts, offset=None, pointwise=None):
    function = setting.output.pointwise if pointwise is None else pointwise
    return frozen.Frozen(setting.output, setting.trained_rows, contexts, function, offset)


KINDS = {
    "plain": {},
    "bias": {"bias": True},
    "capped": {"pointwise": Softcap(3.0)},
    "both": {"bias": True, "pointwise": Softcap(3.0)},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("contexts", [plain, mixture])
@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_the_start_is_the_model_to_the_rounding(kind, contexts, scale):
    output = layer(**KINDS[kind], size=0.5 / scale)
    setting = ready(output, scale=scale)
    model = start(setting, contexts(12))
    assert len(setting.trained_rows) < 200
    parts = split(output.logits, width=12, scale=scale)
    for sampled, part in ((setting.fit, parts.fit), (setting.choose, parts.choose)):
        exact = output.losses(part.hidden, part.targets)
        torch.testing.assert_close(model.losses(sampled), exact, rtol=2e-5, atol=2e-5)
        torch.testing.assert_close(model.exact_losses(sampled.tokens, 1 << 20), exact, rtol=2e-5, atol=2e-5)


def test_scaling_states_changes_no_score():
    output = layer()
    setting = ready(output, scale=50.0)
    assert float(setting.split.fit.hidden.square().mean()) == pytest.approx(1, rel=1e-4)
    held = split(output.logits, width=12, scale=50.0).held_out
    torch.testing.assert_close(
        setting.output.losses(setting.split.held_out.hidden, held.targets),
        output.losses(held.hidden, held.targets),
        rtol=1e-4,
        atol=1e-4,
    )


def moved(setting, contexts):
    """A head that is no longer where it started, in its contexts and in the rows that are trained."""
    model = start(setting, contexts)
    with torch.no_grad():
        generator = torch.Generator().manual_seed(4)
        for parameter in model.parameters():
            parameter += 0.15 * torch.randn(parameter.shape, generator=generator)
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_the_estimated_normaliser_is_unbiased_after_a_move(kind):
    output = layer(60, 8, **KINDS[kind])
    one = frozen.Tokens(
        hidden=gaussian(1, 8, seed=3).expand(20000, 8),
        targets=torch.full((20000,), 5),
        blocks=torch.zeros(20000, dtype=torch.int64),
    )
    rows = torch.arange(0, 60, 3).unique(sorted=True)
    rows = torch.cat([rows, torch.tensor([5])]).sort().values
    sampled = frozen.sample(output, one, rows, 4, 1 << 24, torch.Generator().manual_seed(0))
    whole = frozen.Split(fit=one, choose=one, held_out=one)
    setting = frozen.Setting(output=output, split=whole, fit=sampled, choose=sampled, limit=1 << 24)
    model = moved(setting, plain(8))
    with torch.no_grad():
        exact = model.exact_losses(one.first(1), 1 << 24)[0]
        # The same target score stands in both, so that the ratio of Z is the ratio of exp(loss).
        ratio = (model.losses(sampled) - exact).double().exp()
    error = float(ratio.std()) / math.sqrt(20000)
    assert float(ratio.std()) > 0.02
    assert abs(float(ratio.mean()) - 1) < 4 * error


def test_draws_follow_the_start_and_spare_the_trained_rows():
    output = layer(30, 6)
    state = gaussian(1, 6, seed=3)
    one = frozen.Tokens(
        hidden=state.expand(4000, 6), targets=torch.zeros(4000, dtype=torch.int64), blocks=torch.zeros(4000)
    )
    rows = torch.tensor([0, 4, 7, 20])
    found = frozen.sample(output, one, rows, 5, 1 << 24, torch.Generator().manual_seed(0))
    assert not torch.isin(found.drawn, rows).any()
    logits = output.logits(state)[0]
    torch.testing.assert_close(found.scores, logits[found.drawn], rtol=1e-5, atol=1e-5)
    others = torch.ones(30, dtype=torch.bool)
    others[rows] = False
    assert float(found.normaliser[0]) == pytest.approx(float(logits[others].logsumexp(0)), rel=1e-5)
    expected = torch.softmax(logits.masked_fill(~others, -math.inf), dim=0)
    share = torch.bincount(found.drawn.flatten(), minlength=30) / 20000
    assert float((share - expected).abs().max()) < 4 * math.sqrt(0.25 / 20000)


def test_the_gradient_of_the_sampled_loss_is_the_exact_one_in_the_mean():
    output = layer(50, 6)
    base = frozen.Tokens(
        hidden=gaussian(8, 6, seed=3), targets=torch.arange(8), blocks=torch.zeros(8, dtype=torch.int64)
    )
    many = frozen.Tokens(
        hidden=base.hidden.repeat(600, 1), targets=base.targets.repeat(600), blocks=base.blocks.repeat(600)
    )
    rows = torch.arange(15)
    sampled = frozen.sample(output, many, rows, 32, 1 << 24, torch.Generator().manual_seed(0))
    whole = frozen.Split(fit=many, choose=many, held_out=many)
    setting = frozen.Setting(output=output, split=whole, fit=sampled, choose=sampled, limit=1 << 24)
    model = moved(setting, mixture(6))
    model.losses(sampled).mean().backward()
    found = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    # The definition, dense: only the trained rows are parameters.
    weight = torch.cat([model.matrix, output.weight[15:]])
    contexts, log_prior = model.contexts([base.hidden])
    log_probs = torch.log_softmax(contexts @ weight.T, dim=-1)[torch.arange(8), :, base.targets]
    (-(log_prior + log_probs).logsumexp(dim=-1)).mean().backward()
    for name, parameter in model.named_parameters():
        difference = float((found[name] - parameter.grad).norm())
        assert difference < 0.03 * float(parameter.grad.norm()) + 1e-7, name


def test_every_target_is_trained_and_then_the_likeliest():
    output = layer(100, 6, bias=True)
    output.bias[77] += 9
    tokens = frozen.Tokens(
        hidden=gaussian(50, 6), targets=torch.arange(50) % 11 * 9, blocks=torch.arange(50) // 5
    )
    rows = frozen.rows_to_train(output, tokens, 20, 1 << 20)
    assert len(rows) == 20
    assert torch.equal(rows, rows.unique())
    assert torch.isin(tokens.targets, rows).all()
    assert 77 in rows.tolist()
    # More distinct targets than rows were asked for: all of them, and nothing else.
    assert torch.equal(frozen.rows_to_train(output, tokens, 3, 1 << 20), tokens.targets.unique())
    assert torch.equal(frozen.rows_to_train(output, tokens, 1000, 1 << 20), torch.arange(100))


def test_targets_outside_the_trained_rows_are_judged_too():
    setting = ready(layer(400, 8), rows=1, counts=(40, 100, 100))
    assert not torch.isin(setting.split.choose.targets, setting.trained_rows).all()
    model = moved(setting, plain(8))
    ids = setting.choose.rows
    assert torch.equal(ids[setting.choose.place], setting.split.choose.targets)
    # Trained rows are taken from the head, the others from the start.
    rows = model._rows_of(ids)
    trained = torch.isin(ids, setting.trained_rows)
    assert torch.equal(rows[trained], model.matrix)
    assert torch.equal(rows[~trained], setting.output.weight[ids[~trained]])


@pytest.mark.parametrize("kind", KINDS)
def test_a_fit_finds_a_planted_improvement(kind):
    """Targets come from the layer on turned states: one matrix M h away from the start."""
    output = layer(80, 8, size=1.0, **KINDS[kind])
    turn = torch.linalg.qr(torch.eye(8) + 0.5 * gaussian(8, 8, seed=5)).Q

    def truth(hidden):
        return output.logits(hidden @ turn)

    setting = frozen.setting(output, split(truth, (2500, 400, 1000), width=8))
    held_out = setting.split.held_out
    scale = float((setting.output.weight[0] / output.weight[0])[0])
    ideal = float(torch.nn.functional.cross_entropy(truth(held_out.hidden * scale), held_out.targets))
    before = float(setting.output.losses(held_out.hidden, held_out.targets).mean())
    found = frozen.fit(setting, lambda: plain(8), epochs=5, rates=(0.18, 0.54))
    after = float(found.losses.mean())
    assert before > ideal + 0.1
    assert after < ideal + 0.25 * (before - ideal)
    assert after > ideal - 0.01
    assert found.steps > 0


def test_a_fit_is_never_worse_on_the_choose_part_than_its_start():
    setting = ready(layer(150, 8))
    before = frozen._Run(setting, lambda: plain(8), IDENTITY, None, 0.1, 1, 0).best[0]
    for rate in (0.001, 0.06, 100.0):
        found = frozen.fit(setting, lambda: plain(8), rates=(rate,), epochs=2)
        assert found.choose_loss <= before
    # A pace that wrecks the head: it comes back as it was.
    held_out = setting.split.held_out
    assert found.steps == 0
    torch.testing.assert_close(
        found.losses, setting.output.losses(held_out.hidden, held_out.targets), rtol=1e-5, atol=1e-5
    )


def test_the_best_rate_of_the_race_goes_on():
    output = layer(80, 8, size=1.0)
    turn = torch.linalg.qr(torch.eye(8) + 0.5 * gaussian(8, 8, seed=5)).Q
    setting = frozen.setting(
        output, split(lambda hidden: output.logits(hidden @ turn), (1024, 300, 300), width=8)
    )
    found = frozen.fit(setting, lambda: plain(8), rates=(1e-5, 0.3, 1000.0), epochs=2)
    assert found.rate == 0.3
    assert found.steps in (4, 8)
    assert found.parameters == 8 * 8 + 8 + 8 + setting.trained_rows.numel() * 8


def test_fits_are_the_same_for_a_seed_and_not_for_another():
    def once(seed):
        return frozen.fit(ready(layer(150, 8)), lambda: mixture(8), epochs=2, rates=(0.2,), seed=seed).losses

    assert torch.equal(once(0), once(0))
    assert not torch.equal(once(0), once(1))


@pytest.mark.parametrize("V", [2, 5, 12])
@pytest.mark.parametrize("kind", ["plain", "both"])
def test_vocabularies_so_small_that_no_other_rows_are_left(V, kind):
    setting = ready(layer(V, 8, **KINDS[kind]))
    assert len(setting.trained_rows) == V
    model = moved(setting, mixture(8))
    losses = model.losses(setting.fit)
    torch.testing.assert_close(losses, model.exact_losses(setting.split.fit, 1 << 20), rtol=1e-4, atol=1e-4)
    losses.mean().backward()
    assert all(bool(parameter.grad.isfinite().all()) for parameter in model.parameters())
    assert math.isfinite(frozen.fit(setting, lambda: mixture(8), epochs=2).choose_loss)


def test_offsets_that_keep_sigsoftmax_near_softmax_are_chosen():
    # Targets come from a plain softmax: sigsoftmax is that far above zero.
    setting = ready(layer(150, 8, size=1.0))
    offset = frozen._best_offset(setting, lambda: plain(8), SIGSOFTMAX, (0.0, 20.0), 0)
    assert offset == 20.0
    found = frozen.fit(setting, lambda: plain(8), pointwise=SIGSOFTMAX, offsets=(0.0, 20.0), epochs=1)
    held_out = setting.split.held_out
    original = setting.output.losses(held_out.hidden, held_out.targets)
    assert float(found.losses.mean()) < float(original.mean()) + 0.02


@pytest.mark.parametrize("offset", [0.0, 2.0])
def test_an_offset_counts_in_the_sampled_and_the_exact_loss(offset):
    setting = ready(layer(40, 6, bias=True), rows=40)
    model = start(setting, plain(6), offset, SIGSOFTMAX)
    exact = model.exact_losses(setting.split.fit, 1 << 20)
    torch.testing.assert_close(model.losses(setting.fit), exact, rtol=1e-4, atol=1e-4)
    logits = SIGSOFTMAX(setting.output.logits(setting.split.fit.hidden) + offset)
    expected = torch.nn.functional.cross_entropy(logits, setting.split.fit.targets, reduction="none")
    torch.testing.assert_close(exact, expected, rtol=1e-4, atol=1e-4)


def test_small_memory_changes_no_draw_that_matters():
    output = layer(100, 6)
    parts = split(output.logits, width=6)
    wide, narrow = (frozen.setting(output, parts, rows=30, limit=limit) for limit in (1 << 26, 1 << 12))
    torch.testing.assert_close(wide.fit.normaliser, narrow.fit.normaliser)
    assert torch.equal(wide.trained_rows, narrow.trained_rows)


def test_states_of_zero_are_refused():
    nothing = frozen.Tokens(
        hidden=torch.zeros(10, 4), targets=torch.zeros(10, dtype=torch.int64), blocks=torch.zeros(10)
    )
    with pytest.raises(FullrankError, match="zero"):
        frozen.setting(layer(20, 4), frozen.Split(fit=nothing, choose=nothing, held_out=nothing))
