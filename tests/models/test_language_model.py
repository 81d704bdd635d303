"""Body and head as one: the loss, the penalties by hand, and one matrix for both ends."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fullrank.errors import FullrankError
from fullrank.heads import build
from fullrank.heads.base import Head
from fullrank.heads.vocab_parallel import shard
from fullrank.models.awd_lstm import AwdLstm
from fullrank.models.body import Body, BodyOutput, Carried
from fullrank.models.language_model import LanguageModel

V, LAST, HIDDEN = 19, 6, 8
DOC_LAYERS = ((LAST, 3), (HIDDEN, 2))


def lstm(**options: Any) -> AwdLstm:
    sizes = {"vocab": V, "embedding": LAST, "hidden": HIDDEN, "last": LAST, "layers": 2}
    return AwdLstm(**{**sizes, **options})


def head(name: str, **options: Any) -> Head:
    extra = {"layers": DOC_LAYERS} if name == "doc" else {}
    return build(name, hidden=LAST, vocab=V, bias=True, **extra, **options)


def model(name: str = "softmax", *, dropout: float = 0.3, **options: Any) -> LanguageModel:
    torch.manual_seed(0)
    mixture = {"dropout": 0.3} if name in ("mos", "doc") else {}
    body = lstm(dropout=dropout, dropout_hidden=dropout, weight_drop=dropout)
    built = LanguageModel(body, head(name, **mixture), **options).double()
    with torch.no_grad():
        # Away from the start, where all components are equal and log p is nearly uniform.
        for parameter in built.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return built


def batch() -> tuple[Tensor, Tensor]:
    ids = torch.randint(V, (3, 8), generator=torch.Generator().manual_seed(2))
    return ids[:, :-1], ids[:, 1:]


class Given(Body):
    """A body whose states are what the test says."""

    context = None

    def __init__(self, dropped: Tensor, raw: Tensor) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(V, dropped.shape[-1])
        self.widths = (dropped.shape[-1],)
        self.output = BodyOutput([dropped], raw, ())

    def start(self, batch: int, device: torch.device) -> Carried:
        return ()

    def forward(self, ids: Tensor, carried: Carried = ()) -> BodyOutput:
        return self.output


@pytest.mark.parametrize("name", ["softmax", "mos", "sigsoftmax", "doc"])
def test_the_loss_is_minus_the_mean_log_probability_of_the_targets(name: str) -> None:
    built = model(name, activation=2.0, temporal=1.0).eval()
    ids, targets = batch()
    log_probs = built(ids).value
    assert log_probs.shape == (3, 7, V)
    assert log_probs.dtype == torch.float64
    torch.testing.assert_close(log_probs.exp().sum(-1), torch.ones(3, 7).double())
    expected = -log_probs.gather(-1, targets[..., None])[..., 0]
    mean, each = built(ids, targets), built(ids, targets, reduction="none")
    torch.testing.assert_close(mean.value, expected.mean(), rtol=1e-10, atol=0)
    torch.testing.assert_close(each.value, expected, rtol=1e-10, atol=1e-12)
    # Penalties belong to training alone.
    torch.testing.assert_close(mean.nll, mean.value.detach(), rtol=0, atol=0)
    assert not mean.nll.requires_grad
    assert built(ids).nll.numel() == 0


def test_activation_and_temporal_penalties_by_hand() -> None:
    # Two texts, three tokens, width two.
    raw = torch.tensor([[[1.0, 0.0], [3.0, 0.0], [3.0, 2.0]], [[0.0, 0.0], [0.0, 1.0], [0.0, 1.0]]])
    dropped = torch.tensor([[[2.0, 0.0], [0.0, 0.0], [0.0, 4.0]], [[0.0, 0.0], [0.0, 2.0], [0.0, 0.0]]])
    ids = torch.zeros(2, 3, dtype=torch.long)
    body = Given(dropped, raw)
    top = build("softmax", hidden=2, vocab=V)
    built = LanguageModel(body, top, activation=2.0, temporal=3.0)
    prediction = built(ids, ids)
    # Squares of dropped: 4 + 16 + 4 over 12 entries; squared steps of raw: 4 + 4 + 1 over 8 entries.
    expected = prediction.nll + 2.0 * 24 / 12 + 3.0 * 9 / 8
    torch.testing.assert_close(prediction.value, expected)
    one = LanguageModel(Given(dropped[:, :1], raw[:, :1]), top, temporal=3.0)(ids[:, :1], ids[:, :1])
    assert torch.equal(one.value.detach(), one.nll)


def test_balance_penalty_by_hand() -> None:
    # Three tokens whose priors over two components are (.5, .5), (.8, .2) and (.8, .2).
    top = build("mos", hidden=1, vocab=V, components=2)
    with torch.no_grad():
        top.contexts.gate.weight.copy_(torch.tensor([[1.0], [0.0]]))
    gate = torch.log(torch.tensor(4.0))
    states = torch.stack([torch.tensor(0.0), gate, gate])[None, :, None]
    ids = torch.zeros(1, 3, dtype=torch.long)
    prediction = LanguageModel(Given(states, states), top, balance=10.0)(ids, ids)
    # Masses 2.1 and .9: mean 1.5, deviations of .6.
    torch.testing.assert_close(prediction.value, prediction.nll + 10.0 * (0.6 / 1.5) ** 2)


@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
@pytest.mark.parametrize("name", ["moc", "mos", "moss", "trunk", "doc"])
def test_balance_acts_on_every_mixture_whatever_way_its_loss_took(name: str, split: bool) -> None:
    """Trunk has a shorter way to its loss than through whole rows; W split over processes is another."""
    built = model(name, dropout=0.0, tie=False, balance=3.0)
    ids, targets = batch()
    built.head.contexts.dropout.probability = 0.0
    contexts = built.head.contexts
    log_prior = contexts(built.body(ids).states[: built.head.states])[1]
    mass = log_prior.flatten(0, -2).exp().sum(0)
    assert mass.std() > 0.1
    if split:
        built.head = shard(built.head)
    prediction = built(ids, targets)
    expected = prediction.nll + 3.0 * mass.var(correction=0) / mass.mean().square()
    torch.testing.assert_close(prediction.value, expected, rtol=1e-10, atol=0)
    (found,) = torch.autograd.grad(prediction.value, contexts.gate.weight)
    built.balance = 0.0
    (plain,) = torch.autograd.grad(built(ids, targets).value, contexts.gate.weight)
    (penalty,) = torch.autograd.grad(expected, contexts.gate.weight)
    torch.testing.assert_close(found, plain + penalty, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("name", ["mos", "doc"])
def test_balance_draws_no_masks_of_its_own_and_reaches_the_gate(name: str) -> None:
    ids, targets = batch()
    plain, balanced = model(name), model(name, balance=5.0)
    found = []
    for built in (plain, balanced):
        torch.manual_seed(7)
        found.append((built(ids, targets), torch.get_rng_state()))
    assert torch.equal(found[0][0].nll, found[1][0].nll)
    assert torch.equal(found[0][1], found[1][1])
    assert found[1][0].value > found[0][0].value
    for prediction, _ in found:
        prediction.value.backward()
    assert not torch.allclose(plain.head.contexts.gate.weight.grad, balanced.head.contexts.gate.weight.grad)


@pytest.mark.parametrize("options", [{"reduction": "none"}, {}])
def test_penalties_are_left_out_where_no_mean_is_trained_on(options: dict[str, Any]) -> None:
    ids, targets = batch()
    built = model("mos", activation=1.0, temporal=1.0, balance=1.0)
    built.train(mode="reduction" in options)
    prediction = built(ids, targets, **options)
    assert torch.equal(prediction.value.detach(), prediction.nll)


def test_tying_shares_the_matrix() -> None:
    tied, free = model(), model(tie=False)
    assert tied.head.decoder.weight is tied.body.embedding.weight
    assert tied.head.decoder.weight.data_ptr() == tied.body.embedding.weight.data_ptr()
    difference = sum(p.numel() for p in free.parameters()) - sum(p.numel() for p in tied.parameters())
    assert difference == V * LAST
    # The gradient of the one matrix is that of both ends.
    free.load_state_dict(tied.state_dict())
    ids, targets = batch()
    for built in (tied, free):
        built.eval()
        built(ids, targets).value.backward()
    both = free.body.embedding.weight.grad + free.head.decoder.weight.grad
    torch.testing.assert_close(tied.body.embedding.weight.grad, both)


def test_carried_state_goes_through() -> None:
    built = model().eval()
    ids, targets = batch()
    whole = built(ids, targets, reduction="none").value
    first = built(ids[:, :4], targets[:, :4], reduction="none")
    second = built(ids[:, 4:], targets[:, 4:], first.carried, reduction="none")
    torch.testing.assert_close(torch.cat([first.value, second.value], 1), whole, rtol=1e-10, atol=1e-12)


def test_a_pointer_is_given_the_ids() -> None:
    built, (ids, targets) = model("pointer"), batch()
    built.eval()
    swapped = built(ids.clone(), targets).value
    expected = built.head(built.body(ids).states[:1], targets, context=ids)
    torch.testing.assert_close(swapped, expected, rtol=1e-12, atol=0)


def test_autocast_gives_a_finite_loss_in_fp32() -> None:
    built, (ids, targets) = model("mos", activation=1.0, temporal=1.0, balance=1.0).float(), batch()
    with torch.autocast("cpu", torch.bfloat16):
        prediction = built(ids, targets)
        prediction = built(ids, targets, prediction.carried)
    assert prediction.value.dtype == torch.float32
    prediction.value.backward()
    assert all(bool(parameter.grad.isfinite().all()) for parameter in built.parameters())


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(FullrankError, match=r"doc reads states of widths \[6, 9\], the body gives \[6, 8\]"):
        LanguageModel(lstm(), build("doc", hidden=LAST, vocab=V, layers=((LAST, 1), (9, 1))))
    with pytest.raises(FullrankError, match="softmax has no prior over components"):
        LanguageModel(lstm(), head("softmax"), balance=1.0)
    with pytest.raises(FullrankError, match="cannot be tied"):
        LanguageModel(lstm(embedding=5), head("softmax"))
