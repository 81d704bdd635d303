"""The objective: the loss, the penalties by hand, and one matrix for both ends."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fullrank.errors import FullrankError
from fullrank.heads import build
from fullrank.heads.vocab_parallel import shard
from fullrank.models.awd_lstm import AwdLstmOutput
from fullrank.train.objective import Objective, token_losses
from tests import small_models

V, LAST, HIDDEN = 19, 6, 8


def objective(
    name: str = "softmax", *, dropout: float = 0.3, tie: bool = True, **penalties: Any
) -> Objective:
    torch.manual_seed(0)
    options: dict[str, Any] = {"bias": True}
    options |= {"dropout": dropout} if name in ("mos", "doc") else {}
    options |= {"layers": ((LAST, 3), (HIDDEN, 2))} if name == "doc" else {}
    model = small_models.lstm(
        name, vocab=V, tie=tie, options=options, dropout=dropout, dropout_hidden=dropout, weight_drop=dropout
    )
    with torch.no_grad():
        # Away from the start, where all components are equal and log p is nearly uniform.
        for parameter in model.double().parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return Objective(model, **penalties)


def batch() -> tuple[Tensor, Tensor]:
    ids = torch.randint(V, (3, 8), generator=torch.Generator().manual_seed(2))
    return ids[:, :-1], ids[:, 1:]


class Given(small_models.Body):
    """A body whose states are what the test says."""

    def __init__(self, dropped: Tensor, undropped: Tensor | None = None) -> None:
        super().__init__(V, dropped.shape[-1], dropped.shape[-1])
        self.given = dropped, undropped

    def forward(self, input_ids: Tensor, **unused: Any) -> AwdLstmOutput:
        return AwdLstmOutput(last_hidden_state=self.given[0], undropped=self.given[1])


@pytest.mark.parametrize("name", ["softmax", "mos", "sigsoftmax", "doc"])
def test_the_loss_is_minus_the_mean_log_probability_of_the_targets(name: str) -> None:
    plain = objective(name).eval()
    ids, targets = batch()
    log_probs = plain.model(ids).logits
    torch.testing.assert_close(log_probs.exp().sum(-1), torch.ones(3, 7).double())
    expected = -log_probs.gather(-1, targets[..., None])[..., 0]
    found = plain(ids, targets)
    torch.testing.assert_close(found.value, expected.mean(), rtol=1e-10, atol=0)
    torch.testing.assert_close(found.nll, found.value.detach(), rtol=0, atol=0)
    assert not found.nll.requires_grad
    each = token_losses(plain.model, ids, targets)
    torch.testing.assert_close(each.nll, expected, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(each.state, plain.model.model(ids).last_hidden_state)


def test_activation_and_temporal_penalties_by_hand() -> None:
    # Two texts, three tokens, width two.
    raw = torch.tensor([[[1.0, 0.0], [3.0, 0.0], [3.0, 2.0]], [[0.0, 0.0], [0.0, 1.0], [0.0, 1.0]]])
    dropped = torch.tensor([[[2.0, 0.0], [0.0, 0.0], [0.0, 4.0]], [[0.0, 0.0], [0.0, 2.0], [0.0, 0.0]]])
    ids = torch.zeros(2, 3, dtype=torch.long)
    top = build("softmax", hidden=2, vocab=V)
    prediction = Objective(small_models.under(Given(dropped, raw), top), activation=2.0, temporal=3.0)(
        ids, ids
    )
    # Squares of dropped: 4 + 16 + 4 over 12 entries; squared steps of raw: 4 + 4 + 1 over 8 entries.
    expected = prediction.nll + 2.0 * 24 / 12 + 3.0 * 9 / 8
    torch.testing.assert_close(prediction.value, expected)
    one = Objective(small_models.under(Given(dropped[:, :1], raw[:, :1]), top), temporal=3.0)
    found = one(ids[:, :1], ids[:, :1])
    assert torch.equal(found.value.detach(), found.nll)
    # A body that drops nothing at its end has one state: its steps are 4 + 0 + 16 + 0 + 4 + 4.
    alone = Objective(small_models.under(Given(dropped), top), temporal=3.0)(ids, ids)
    torch.testing.assert_close(alone.value, alone.nll + 3.0 * 28 / 8)


def test_balance_penalty_by_hand() -> None:
    # Three tokens whose priors over two components are (.5, .5), (.8, .2) and (.8, .2).
    top = build("mos", hidden=1, vocab=V, components=2, centred=False)
    with torch.no_grad():
        top.contexts.gate.weight.copy_(torch.tensor([[1.0], [0.0]]))
    gate = torch.log(torch.tensor(4.0))
    states = torch.stack([torch.tensor(0.0), gate, gate])[None, :, None]
    ids = torch.zeros(1, 3, dtype=torch.long)
    prediction = Objective(small_models.under(Given(states), top), balance=10.0)(ids, ids)
    # Masses 2.1 and .9: mean 1.5, deviations of .6.
    torch.testing.assert_close(prediction.value, prediction.nll + 10.0 * (0.6 / 1.5) ** 2)


@pytest.mark.parametrize("name", ["softmax", "sigsoftmax", "moc", "mos", "trunk", "doc"])
def test_z_loss_is_of_the_normalisers_of_all_rows(name: str) -> None:
    built = objective(name, dropout=0.0, tie=False, z_loss=0.01)
    ids, targets = batch()
    targets = targets.clone()
    targets[0, :3] = -100
    head = built.model.lm_head
    rows, log_prior, _ = head.flat_parts(built.model.head_inputs(ids).states)
    scores = head.pointwise(rows @ head.decoder.weight.T + head.decoder.bias)
    size = (log_prior.exp() * scores.logsumexp(-1).square()).sum(-1)[targets.flatten() != -100].mean()
    prediction = built(ids, targets)
    torch.testing.assert_close(prediction.value, prediction.nll + 0.01 * size, rtol=1e-10, atol=0)
    (found,) = torch.autograd.grad(prediction.value, head.decoder.weight)
    (penalty,) = torch.autograd.grad(0.01 * size, head.decoder.weight)
    built.z_loss = 0.0
    without = built(ids, targets)
    torch.testing.assert_close(prediction.nll, without.nll, rtol=1e-10, atol=0)
    (plain,) = torch.autograd.grad(without.value, head.decoder.weight)
    torch.testing.assert_close(found, plain + penalty, rtol=1e-8, atol=1e-12)


def test_z_loss_of_a_head_whose_normalisers_are_not_at_hand_is_refused() -> None:
    built = objective("mos", dropout=0.0, tie=False, z_loss=0.01)
    built.model.lm_head = shard(built.model.lm_head)
    with pytest.raises(FullrankError, match="z-loss"):
        built(*batch())


@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
@pytest.mark.parametrize("name", ["moc", "mos", "moss", "trunk", "doc"])
def test_balance_acts_on_every_mixture_whatever_way_its_loss_took(name: str, split: bool) -> None:
    """Trunk has a shorter way to its loss than through whole rows; W split over processes is another."""
    built = objective(name, dropout=0.0, tie=False, balance=3.0)
    ids, targets = batch()
    contexts = built.model.lm_head.contexts
    log_prior = contexts(built.model.head_inputs(ids).states)[1]
    mass = log_prior.flatten(0, -2).exp().sum(0)
    assert mass.std() > 0.1
    if split:
        built.model.lm_head = shard(built.model.lm_head)
    prediction = built(ids, targets)
    expected = prediction.nll + 3.0 * mass.var(correction=0) / mass.mean().square()
    torch.testing.assert_close(prediction.value, expected, rtol=1e-10, atol=0)
    (found,) = torch.autograd.grad(prediction.value, contexts.gate.weight)
    built.balance = 0.0
    (plain,) = torch.autograd.grad(built(ids, targets).value, contexts.gate.weight)
    (penalty,) = torch.autograd.grad(expected, contexts.gate.weight)
    torch.testing.assert_close(found, plain + penalty, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("name", ["mos", "moc", "doc"])
def test_balance_of_the_parts_of_a_batch_is_that_of_the_batch(name: str) -> None:
    """Rows go to accumulated parts or to processes, whose gradients are averaged."""
    built = objective(name, dropout=0.0, tie=False, balance=30.0)
    ids = torch.randint(V, (8, 7), generator=torch.Generator().manual_seed(2))
    targets = ids.roll(-1, 1)
    parts = list(zip(ids.split(4), targets.split(4), strict=True))
    names, parameters = zip(*built.named_parameters(), strict=True)

    def gradients(value: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(value, parameters)

    whole = built(ids, targets)
    usage = torch.stack([built(*part).usage for part in parts]).mean(0)
    torch.testing.assert_close(usage, whole.usage, rtol=1e-12, atol=0)
    predictions = [built(*part, usage=usage) for part in parts]
    value = torch.stack([prediction.value for prediction in predictions]).mean()
    torch.testing.assert_close(value, whole.value, rtol=1e-12, atol=0)
    expected = gradients(whole.value)
    # The mean of the parts' own balance terms has another gradient.
    local = gradients(torch.stack([built(*part).value for part in parts]).mean())
    for of, found, other, alone in zip(names, gradients(value), expected, local, strict=True):
        torch.testing.assert_close(
            found, other, rtol=1e-9, atol=1e-12, msg=lambda text, of=of: f"{of}: {text}"
        )
        if "gate" in of or "prior" in of:
            assert (alone - other).abs().max() > 1e-6, of


@pytest.mark.parametrize("name", ["mos", "doc"])
def test_balance_draws_no_masks_of_its_own_and_reaches_the_gate(name: str) -> None:
    ids, targets = batch()
    both = objective(name), objective(name, balance=5.0)
    found = []
    for built in both:
        torch.manual_seed(7)
        found.append((built(ids, targets), torch.get_rng_state()))
    assert torch.equal(found[0][0].nll, found[1][0].nll)
    assert torch.equal(found[0][1], found[1][1])
    assert found[1][0].value > found[0][0].value
    for prediction, _ in found:
        prediction.value.backward()
    gates = [built.model.lm_head.contexts.gate.weight.grad for built in both]
    assert not torch.allclose(*gates)


def test_tying_shares_the_matrix() -> None:
    tied, free = objective().model, objective(tie=False).model
    assert tied.lm_head.decoder.weight is tied.model.embedding.weight
    assert free.num_parameters() - tied.num_parameters() == V * LAST
    # The gradient of the one matrix is that of both ends.
    free.load_state_dict(tied.state_dict())
    ids, targets = batch()
    for built in (tied, free):
        Objective(built.eval())(ids, targets).value.backward()
    both = free.model.embedding.weight.grad + free.lm_head.decoder.weight.grad
    torch.testing.assert_close(tied.model.embedding.weight.grad, both)


def test_carried_state_goes_through() -> None:
    model = objective().model.eval()
    ids, targets = batch()
    whole = token_losses(model, ids, targets).nll
    first = token_losses(model, ids[:, :4], targets[:, :4])
    second = token_losses(model, ids[:, 4:], targets[:, 4:], first.carried)
    torch.testing.assert_close(torch.cat([first.nll, second.nll], 1), whole, rtol=1e-10, atol=1e-12)
    half = Objective(model)(ids[:, :4], targets[:, :4]).carried
    assert all(torch.equal(one, two) for one, two in zip(half, first.carried, strict=True))
    assert Objective(small_models.transformer(vocab=V, context=9))(ids, targets).carried == ()


def test_a_pointer_is_given_the_ids() -> None:
    built, (ids, targets) = objective("pointer").eval(), batch()
    states = built.model.head_inputs(ids).states
    expected = built.model.lm_head(states, targets, context=ids)
    torch.testing.assert_close(built(ids, targets).value, expected, rtol=1e-12, atol=0)


def test_autocast_gives_a_finite_loss_in_fp32() -> None:
    built, (ids, targets) = objective("mos", activation=1.0, temporal=1.0, balance=1.0).float(), batch()
    with torch.autocast("cpu", torch.bfloat16):
        prediction = built(ids, targets)
        prediction = built(ids, targets, prediction.carried)
    assert prediction.value.dtype == torch.float32
    prediction.value.backward()
    assert all(bool(parameter.grad.isfinite().all()) for parameter in built.parameters())


def test_a_head_without_a_prior_cannot_be_balanced() -> None:
    with pytest.raises(FullrankError, match="softmax has no prior over components"):
        objective(balance=1.0)
