"""Monitors against ground truth by construction, and proof that they leave training alone."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from fullrank.diagnose.monitors import MONITORS, contexts_wanted
from fullrank.diagnose.questions.spectrum import spectrum
from fullrank.errors import FullrankError
from fullrank.heads import build
from fullrank.models import FullrankForCausalLM
from fullrank.theory import least_rank
from fullrank.train.monitor import measure
from fullrank.train.objective import Objective
from tests import small_models

V, D, K = 60, 8, 4
OPTIONS = {
    "low_rank": {"rank": 3},
    "mos": {"components": K},
    "moss": {"components": K},
    "moc": {"components": K},
    "trunk": {"components": K},
    "doc": {"layers": ((D, 2), (5, 1))},
    "mixtape": {"components": 2},
    "facets": {"layers": 1, "positions": 2, "partitions": 2, "softmaxes": 2},
    "pointer": {"rerank": (5,)},
}


class RunningMean(small_models.Body):
    """States that depend on all tokens before, of two layers, with dropout in training."""

    def __init__(self, vocab: int = V, widths: tuple[int, ...] = (D, 5)) -> None:
        super().__init__(vocab, D, widths[0])
        self.layers = nn.ModuleList(nn.Linear(D, width) for width in widths)
        self.dropout = nn.Dropout(0.3)

    def states(self, ids: Tensor) -> list[Tensor]:
        seen = self.embedding(ids)
        seen = self.dropout(seen) + seen.cumsum(dim=1) / 4
        return [torch.tanh(layer(seen)) for layer in self.layers]


def model_with(
    name: str, *, bias: bool = False, tie: bool = False, differ: bool = True
) -> FullrankForCausalLM:
    torch.manual_seed(3)
    head = build(name, hidden=D, vocab=V, bias=bias, **OPTIONS.get(name, {}))
    if differ and hasattr(head, "contexts") and hasattr(head.contexts, "differences"):
        for difference in head.contexts.differences:
            nn.init.normal_(difference.weight, std=0.5)
    nn.init.normal_(head.decoder.weight)
    return small_models.under(RunningMean(), head, tie=tie)


@pytest.fixture
def ids() -> Tensor:
    return torch.randint(0, V, (6, 20), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    "name", ["softmax", "low_rank", "sigsoftmax", "plif", "moc", "mos", "moss", "trunk", "doc", "mixtape",
             "facets", "pointer"],
)  # fmt: skip
def test_every_head_is_measured_and_every_value_has_a_meaning(name: str, ids: Tensor) -> None:
    found = measure(model_with(name), ids)
    assert set(found) <= set(MONITORS)
    assert {"head_effective_rank", "anisotropy", "logprob_rank", "state_norm"} <= set(found)
    flat = [number for value in found.values() for number in (value if isinstance(value, list) else [value])]
    assert all(math.isfinite(number) for number in flat)
    mixture = name in ("moc", "mos", "moss", "trunk", "doc")
    assert ("prior_entropy" in found) == mixture
    assert ("component_divergence" in found) == (mixture and name != "moc")


@pytest.mark.parametrize(
    ("name", "bias", "rank"),
    [("softmax", False, D), ("softmax", True, D + 1), ("low_rank", False, 3), ("low_rank", True, 4),
     ("moc", False, D), ("mos", False, None), ("moss", False, None), ("mixtape", False, None),
     ("facets", False, None)],
)  # fmt: skip
def test_rank_is_the_width_of_one_softmax_and_the_ceiling_of_a_mixture(
    name: str, bias: bool, rank: int | None, ids: Tensor
) -> None:
    model = model_with(name, bias=bias)
    if bias:
        nn.init.normal_(model.lm_head.decoder.bias)
    found = measure(model, ids)
    assert found["logprob_rank_ceiling"] == contexts_wanted(model.lm_head) == D + 2 + 32
    assert found["logprob_rank"] == (found["logprob_rank_ceiling"] if rank is None else rank)


def test_a_mixture_whose_components_are_equal_has_the_rank_of_one_softmax(ids: Tensor) -> None:
    found = measure(model_with("mos", differ=False), ids)
    assert found["logprob_rank"] == D
    assert found["component_divergence"] == pytest.approx(0.0, abs=1e-5)


def test_the_sampled_table_is_that_of_the_model_up_to_shifts(ids: Tensor) -> None:
    """With every context and token in the sample, the effective rank is that of the head's own output."""
    model = model_with("moss").eval()
    found = measure(model, ids, rank_contexts=ids.numel())
    with torch.no_grad():
        states = model.head_inputs(ids).states
        table = model.lm_head.double()([states[0].double()]).flatten(0, 1)
    # Singular values are independent of the order of contexts and tokens.
    values = least_rank(table).singular_values
    shares = values / values.sum()
    expected = math.exp(-float(torch.special.xlogy(shares, shares).sum()))
    assert found["logprob_effective_rank"] == pytest.approx(expected, rel=1e-4)


def test_the_rank_is_that_of_few_contexts_where_there_are_few(ids: Tensor) -> None:
    found = measure(model_with("mos"), ids[:1, :5])
    assert found["logprob_rank"] == found["logprob_rank_ceiling"] == 5


def test_spectrum_as_diagnose_has_it_and_a_planted_collapse(ids: Tensor) -> None:
    model = model_with("softmax", tie=True)
    found = measure(model, ids)
    expected = spectrum(model.lm_head.decoder.weight.detach())
    assert found["head_effective_rank"] == pytest.approx(expected.effective_rank)
    assert found["head_singular_entropy"] == pytest.approx(expected.singular_entropy)
    assert found["head_effective_rank_share"] == pytest.approx(expected.effective_rank / D)
    assert found["head_condition"] == pytest.approx(expected.condition)
    with torch.no_grad():
        column = torch.linspace(1, 2, V)[:, None]
        model.lm_head.decoder.weight.copy_(column @ torch.ones(1, D))
    found = measure(model, ids)
    assert found["head_effective_rank"] == pytest.approx(1.0, abs=1e-3)
    assert found["logprob_rank"] == 1
    assert found["head_weight_norm_mean"] == pytest.approx(1.5 * math.sqrt(D))


def test_anisotropy_of_states_that_are_known(ids: Tensor) -> None:
    model = model_with("softmax")
    with torch.no_grad():
        model.model.layers[0].weight.zero_()
        model.model.layers[0].bias.fill_(0.5)
    found = measure(model, ids)
    assert found["anisotropy"] == pytest.approx(1.0, abs=1e-6)
    assert found["state_norm"] == pytest.approx(math.tanh(0.5) * math.sqrt(D), rel=1e-5)


@pytest.mark.parametrize("name", ["mos", "moc"])
def test_a_dead_component_is_counted_and_has_share_zero(name: str, ids: Tensor) -> None:
    model = model_with(name)
    assert measure(model, ids)["dead_components"] == 0
    with torch.no_grad():
        # The states' first entry is near 1 everywhere, so this gate is far below the others everywhere.
        model.model.layers[0].weight[0].zero_()
        model.model.layers[0].bias[0] = 5.0
        gate = model.lm_head.contexts.gate.weight
        gate.zero_()
        gate[2, 0] = -100.0
    found = measure(model, ids)
    assert found["dead_components"] == 1
    shares = found["component_shares"]
    assert isinstance(shares, list)
    assert shares == pytest.approx([1 / 3, 1 / 3, 0.0, 1 / 3], abs=1e-7)
    assert found["prior_entropy"] == pytest.approx(math.log(3), abs=1e-6)
    assert found["prior_entropy_share"] == pytest.approx(math.log(3) / math.log(K), abs=1e-6)


def test_a_rare_component_that_is_sure_of_some_tokens_is_not_dead(ids: Tensor) -> None:
    model = model_with("mos")
    with torch.no_grad():
        # Entry 0 of the state is near 1 after token 0 alone, near -1 after any other.
        model.model.embedding.weight.zero_()
        model.model.embedding.weight[0, 0] = 1.0
        model.model.layers[0].weight.zero_()
        model.model.layers[0].weight[0, 0] = 10.0
        model.model.layers[0].bias[0] = -5.0
        gate = model.lm_head.contexts.gate.weight
        gate.zero_()
        gate[1, 0] = 30.0
    few = torch.ones(200, 2, dtype=torch.long)
    assert measure(model, few)["dead_components"] == 1
    few[7, 1] = 0
    found = measure(model, few)
    shares = found["component_shares"]
    assert isinstance(shares, list)
    assert shares[1] == pytest.approx(1 / 400, rel=0.01)
    assert found["dead_components"] == 0


def test_the_divergence_is_that_of_the_components(ids: Tensor) -> None:
    model = model_with("mos").eval()
    found = measure(model, ids[:1, :8])
    with torch.no_grad():
        rows, _ = model.lm_head.rows([model.head_inputs(ids[:1, :8]).states[0][0].double().float()])
        log_probs = torch.log_softmax(rows @ model.lm_head.decoder.weight.T, dim=-1).double()
    pairs = [
        (log_probs[:, i].exp() * (log_probs[:, i] - log_probs[:, j])).sum(dim=1).mean()
        for i in range(K)
        for j in range(K)
        if i != j
    ]
    assert found["component_divergence"] == pytest.approx(float(torch.stack(pairs).mean()), rel=1e-4)


@pytest.mark.parametrize("name", ["softmax", "sigsoftmax", "mos", "trunk", "doc"])
def test_the_kept_gradient_is_that_of_the_loss_in_the_scores(
    name: str, ids: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    # All tokens, so that nothing depends on the draw.
    monkeypatch.setattr("fullrank.diagnose.monitors.GRADIENT_TOKENS", ids.numel())
    model = model_with(name, bias=True).double().eval()
    head = model.lm_head
    states = [state[:, :-1] for state in model.head_inputs(ids).states]
    rows, log_prior, _ = head.flat_parts(states)
    scores = (rows @ head.decoder.weight.T + head.decoder.bias).detach().requires_grad_()
    log_probs = head.pointwise(scores).log_softmax(-1)
    mixed = (log_prior.detach()[..., None] + log_probs).logsumexp(1)
    (slopes,) = torch.autograd.grad(mixed.gather(1, ids[:, 1:].reshape(-1, 1)).sum(), scores)
    # The projection on the columns of W, by QR.
    basis, _ = torch.linalg.qr(head.decoder.weight.detach())
    kept = (slopes @ basis).flatten(1).norm(dim=1) / slopes.flatten(1).norm(dim=1)
    assert measure(model, ids)["gradient_kept"] == pytest.approx(float(kept.mean()), rel=1e-6)


def test_training_is_the_same_bit_for_bit_with_and_without_monitors(ids: Tensor) -> None:
    def weights(monitored: bool) -> list[Tensor]:
        model = model_with("mos", tie=True)
        model.train()
        model.model.layers[1].eval()
        objective, optimiser = Objective(model), torch.optim.AdamW(model.parameters())
        torch.manual_seed(9)
        for step in range(4):
            if monitored and step % 2:
                measure(model, ids, seed=step)
                assert model.training
                assert not model.model.layers[1].training
            optimiser.zero_grad()
            objective(ids[:, :-1], ids[:, 1:]).value.backward()
            optimiser.step()
        return [parameter.detach().clone() for parameter in model.parameters()]

    assert all(torch.equal(a, b) for a, b in zip(weights(False), weights(True), strict=True))


def test_the_same_seed_gives_the_same_numbers_and_leaves_weights_alone(ids: Tensor) -> None:
    model = model_with("trunk")
    before = [parameter.detach().clone() for parameter in model.parameters()]
    assert measure(model, ids, seed=4) == measure(model, ids, seed=4)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())


def test_masked_tokens_are_left_out_of_the_rank(ids: Tensor) -> None:
    model = model_with("softmax", bias=True)
    with torch.no_grad():
        model.lm_head.decoder.bias[::2] = -math.inf
    found = measure(model, ids)
    assert found["logprob_rank"] == D
    assert found["logprob_rank_ceiling"] == V // 2 - 1


@pytest.mark.parametrize("where", ["weight", "state"])
def test_a_model_that_diverged_is_measured_without_an_error(where: str, ids: Tensor) -> None:
    model = model_with("mos")
    with torch.no_grad():
        part = model.lm_head.decoder.weight if where == "weight" else model.model.layers[0].bias
        part.view(-1)[0] = math.nan
    found = measure(model, ids)
    assert "logprob_rank" not in found
    assert math.isnan(found["head_effective_rank"] if where == "weight" else found["state_norm"])  # type: ignore[arg-type]


def test_ids_of_another_shape_are_refused(ids: Tensor) -> None:
    with pytest.raises(FullrankError, match=r"expected \[batch, time\]"):
        measure(model_with("softmax"), ids.flatten())
