"""What holds for every head: a normalised distribution, its loss, and a module that moves."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fullrank.errors import FullrankError
from fullrank.heads import HEADS, Head, build


def every_leaf(head: Head, inputs: Any) -> dict[str, Tensor]:
    leaves = {f"state {place}": state for place, state in enumerate(inputs.each)}
    return leaves | dict(head.named_parameters())


def gradients_of(loss: Tensor, head: Head, inputs: Any) -> dict[str, Tensor]:
    """The gradient of every parameter and state; a leaf that the loss does not reach is an error."""
    leaves = every_leaf(head, inputs)
    return dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))


def gathered(log_probs: Tensor, targets: Tensor) -> Tensor:
    return log_probs.gather(-1, targets.clamp_min(0)[..., None])[..., 0]


def assert_sums_to_one(log_probs: Tensor) -> None:
    assert (torch.logsumexp(log_probs.double(), -1).abs() < 1e-5).all()


def test_every_registered_head_is_in_the_table(cases: dict[str, Any]) -> None:
    assert {case.name for case in cases.values()} == set(HEADS)


@pytest.mark.parametrize("vocab", [11, 3001])
def test_log_probabilities_are_normalised(case: Any, vocab: int) -> None:
    head = case.build(vocab=vocab)
    inputs = case.inputs(head)
    log_probs = head(inputs.states, **inputs.context)
    assert log_probs.dtype == torch.float32
    assert log_probs.shape == (*inputs.targets.shape, vocab)
    assert_sums_to_one(log_probs)
    torch.testing.assert_close(torch.log_softmax(log_probs, -1), log_probs, atol=1e-5, rtol=0)


def test_log_probabilities_without_gradients_are_the_same(case: Any) -> None:
    head = case.build()
    inputs = case.inputs(head)
    with torch.no_grad():
        without = head(inputs.states, **inputs.context)
    assert not without.requires_grad
    torch.testing.assert_close(without, head(inputs.states, **inputs.context), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("reduction", "ignore_index", "weighted"),
    [("mean", -100, False), ("mean", 2, True), ("sum", 2, False), ("none", -100, True), ("none", 2, False)],
    ids=["mean", "weighted-mean", "sum", "weighted-none", "none"],
)
def test_loss_is_the_gathered_log_probability(
    case: Any, reduction: str, ignore_index: int, weighted: bool
) -> None:
    head = case.build().double()
    inputs = case.inputs(head, dtype=torch.float64, gradient=True)
    targets = inputs.targets.clone()
    targets[0, 1] = targets[1, 2] = ignore_index
    weight = torch.rand(targets.shape, dtype=torch.float64) + 0.5 if weighted else None

    counted = (targets != ignore_index).double()
    each = -gathered(head(inputs.states, **inputs.context), targets) * counted
    share = counted if weight is None else counted * weight
    expected = each if weight is None else each * weight
    if reduction != "none":
        expected = expected.sum()
    if reduction == "mean":
        expected = expected / share.sum()

    loss, stats = head(
        inputs.states,
        targets,
        **inputs.context,
        reduction=reduction,
        ignore_index=ignore_index,
        token_weight=weight,
        return_stats=True,
    )
    torch.testing.assert_close(loss, expected, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(stats.nll, each.detach(), rtol=1e-10, atol=1e-12)

    upstream = torch.randn_like(expected)
    ours = gradients_of((loss * upstream).sum(), head, inputs)
    theirs = gradients_of((expected * upstream).sum(), head, inputs)
    for name, gradient in theirs.items():
        assert gradient.abs().max() > 0, f"{name} takes no part in the loss"
        torch.testing.assert_close(
            ours[name], gradient, rtol=1e-8, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_statistics_describe_the_distribution(case: Any) -> None:
    head = case.build().double()
    inputs = case.inputs(head, dtype=torch.float64)
    targets = inputs.targets.clone()
    targets[0, 0] = -100
    _, stats = head(inputs.states, targets, **inputs.context, return_stats=True)
    log_probs = head(inputs.states, **inputs.context)
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    best = log_probs.argmax(-1)
    entropy[0, 0], best[0, 0] = 0.0, -1
    torch.testing.assert_close(stats.argmax, best)
    torch.testing.assert_close(stats.entropy, entropy.detach(), rtol=1e-9, atol=1e-10)


def test_gradients_pass_gradcheck(case: Any) -> None:
    head = case.build(vocab=5).double()
    inputs = case.inputs(head, (1, 2), dtype=torch.float64, gradient=True)
    names = list(dict(head.named_parameters()))
    states = len(inputs.each)

    def loss(*leaves: Tensor) -> Tensor:
        hidden = leaves[0] if isinstance(inputs.states, Tensor) else list(leaves[:states])
        return torch.func.functional_call(
            head,
            dict(zip(names, leaves[states:], strict=True)),
            (hidden, inputs.targets),
            {**inputs.context, "reduction": "none"},
        )

    leaves = tuple(leaf.detach().clone().requires_grad_() for leaf in every_leaf(head, inputs).values())
    assert torch.autograd.gradcheck(loss, leaves, fast_mode=True)


def test_parameter_count_is_the_papers(case: Any) -> None:
    head = case.build()
    expected = case.count(head.hidden, head.vocab, head.width)
    assert sum(parameter.numel() for parameter in head.parameters()) == expected


@pytest.mark.parametrize("leading", [(5,), (2, 1, 3)], ids=["flat", "three-deep"])
def test_leading_shape_is_kept(case: Any, leading: tuple[int, ...]) -> None:
    if not case.any_leading_shape:
        pytest.skip("reads along time")
    head = case.build()
    inputs = case.inputs(head, leading)
    flat = [state.reshape(-1, state.shape[-1]) for state in inputs.each]
    log_probs = head(inputs.states)
    assert log_probs.shape == (*leading, head.vocab)
    torch.testing.assert_close(
        log_probs.flatten(0, -2), head(flat[0] if len(flat) == 1 else flat), atol=1e-6, rtol=0
    )
    assert head(inputs.states, inputs.targets, reduction="none").shape == leading


def test_bfloat16_head_gives_fp32_log_probabilities_near_the_exact_ones(case: Any) -> None:
    head = case.build(**case.smooth).bfloat16()
    inputs = case.inputs(head, dtype=torch.bfloat16)
    wide = [state.double() for state in inputs.each]
    with torch.no_grad():
        log_probs = head(inputs.states, **inputs.context)
        loss = head(inputs.states, inputs.targets, **inputs.context)
        exact = copy.deepcopy(head).double()
        expected = exact(wide[0] if len(wide) == 1 else wide, **inputs.context)
    assert log_probs.dtype == loss.dtype == torch.float32
    assert expected.dtype == torch.float64
    assert_sums_to_one(log_probs)
    # Scores of size up to about ten carry eight bits each.
    assert (log_probs - expected).abs().max() < 0.02 * expected.abs().max()
    assert float(loss) == pytest.approx(float(-gathered(expected, inputs.targets).mean()), rel=0.02)


def test_moves_through_the_meta_device_and_back(case: Any) -> None:
    head = case.build()
    inputs = case.inputs(head)
    saved = {name: tensor.clone() for name, tensor in head.state_dict().items()}
    before = head(inputs.states, **inputs.context)
    head.to("meta")
    assert all(tensor.device.type == "meta" for tensor in (*head.parameters(), *head.buffers()))
    head.to_empty(device="cpu")
    head.load_state_dict(saved)
    torch.testing.assert_close(head(inputs.states, **inputs.context), before, rtol=0, atol=0)


def test_state_dict_brings_the_distribution_back(case: Any) -> None:
    head, other = case.build(seed=0), case.build(seed=5)
    inputs = case.inputs(head)
    before = head(inputs.states, **inputs.context)
    assert not torch.allclose(other(inputs.states, **inputs.context), before, atol=1e-2)
    buffer = io.BytesIO()
    torch.save(head.state_dict(), buffer)
    buffer.seek(0)
    other.load_state_dict(torch.load(buffer, weights_only=True))
    torch.testing.assert_close(other(inputs.states, **inputs.context), before, rtol=0, atol=0)


def test_deepcopy_is_independent(case: Any) -> None:
    head = case.build()
    inputs = case.inputs(head)
    before = head(inputs.states, **inputs.context)
    twin = copy.deepcopy(head)
    torch.testing.assert_close(twin(inputs.states, **inputs.context), before, rtol=0, atol=0)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.add_(torch.randn_like(parameter))
    torch.testing.assert_close(head(inputs.states, **inputs.context), before, rtol=0, atol=0)
    assert not torch.allclose(twin(inputs.states, **inputs.context), before, atol=1e-2)


def test_tied_matrix_is_one_parameter(case: Any) -> None:
    head = case.build()
    embedding = nn.Embedding(head.vocab, head.width)
    inputs = case.inputs(head)
    free = head(inputs.states, **inputs.context)
    head.tie(embedding)
    both = nn.ModuleDict({"embedding": embedding, "head": head})
    assert head.decoder.weight is embedding.weight
    assert sum(parameter.numel() for parameter in both.parameters()) == case.count(
        head.hidden, head.vocab, head.width
    )
    assert not torch.allclose(head(inputs.states, **inputs.context), free, atol=1e-2)

    # The one parameter collects what its use as input and its use as output give each on its own.
    ids = torch.arange(6).view(2, 3)
    penalty = embedding(ids).square().sum()
    loss = head(inputs.states, inputs.targets, **inputs.context)
    (alone,) = torch.autograd.grad(penalty, embedding.weight, retain_graph=True)
    (output,) = torch.autograd.grad(loss, embedding.weight, retain_graph=True)
    assert output.abs().max() > 0
    (penalty + loss).backward()
    torch.testing.assert_close(embedding.weight.grad, alone + output)
    twin = copy.deepcopy(both)
    assert twin["head"].decoder.weight is twin["embedding"].weight


def test_a_bare_parameter_can_be_tied(case: Any) -> None:
    head = case.build()
    weight = nn.Parameter(torch.randn(head.vocab, head.width))
    head.tie(weight)
    assert [parameter for parameter in head.parameters() if parameter is weight]
    assert head.decoder.weight is weight


@pytest.mark.parametrize("shape", [(12, 4), (11, 5), (4, 11)])
def test_wrong_embedding_cannot_be_tied(case: Any, shape: tuple[int, int]) -> None:
    head = case.build()
    before = head.decoder.weight
    with pytest.raises(FullrankError, match=rf"{shape[0]}, {shape[1]}.*\[11, 4\].*width={shape[1]}"):
        head.tie(nn.Embedding(*shape))
    assert head.decoder.weight is before


def test_bias_starts_at_zero_and_masks_at_minus_infinity(case: Any) -> None:
    plain = case.build(bias=False)
    biased = case.build(bias=True, warm=False)
    missing, unexpected = biased.load_state_dict(plain.state_dict(), strict=False)
    assert missing == ["decoder.bias"]
    assert not unexpected
    inputs = case.inputs(plain)
    before = plain(inputs.states, **inputs.context)
    torch.testing.assert_close(biased(inputs.states, **inputs.context), before, atol=1e-6, rtol=0)
    with torch.no_grad():
        biased.decoder.bias[7] = -torch.inf
    masked = biased(inputs.states, **inputs.context)
    assert bool(torch.isneginf(masked[..., 7]).all())
    assert_sums_to_one(masked)
    loss = biased(inputs.states, torch.full_like(inputs.targets, 3), **inputs.context)
    loss.backward()
    for name, parameter in biased.named_parameters():
        assert bool(torch.isfinite(parameter.grad).all()), name


def test_autocast_keeps_the_loss_and_the_parameters_in_fp32(case: Any) -> None:
    head = case.build()
    inputs = case.inputs(head, gradient=True)
    exact = head(inputs.states, inputs.targets, **inputs.context)
    expected = gradients_of(exact, head, inputs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = head(inputs.states, inputs.targets, **inputs.context)
        log_probs = head(inputs.states, **inputs.context)
    assert loss.dtype == log_probs.dtype == torch.float32
    assert_sums_to_one(log_probs)
    assert loss.item() == pytest.approx(exact.item(), rel=0.02)
    for name, gradient in gradients_of(loss, head, inputs).items():
        assert gradient.dtype == torch.float32, name
        assert (gradient - expected[name]).norm() < 0.1 * expected[name].norm(), name


def test_loss_without_gradients_is_the_same(case: Any) -> None:
    head = case.build()
    inputs = case.inputs(head)
    with torch.no_grad():
        loss = head(inputs.states, inputs.targets, **inputs.context)
    assert not loss.requires_grad
    with_gradients = head(inputs.states, inputs.targets, **inputs.context)
    assert with_gradients.requires_grad
    assert loss.item() == pytest.approx(with_gradients.item(), abs=1e-6)


# The compiler's own start takes four seconds; the operators are compiled in tests/ops.
@pytest.mark.slow
@pytest.mark.parametrize("name", ["softmax", "plif", "mos", "doc"])
def test_compiled_loss_is_the_same(cases: dict[str, Any], name: str) -> None:
    head = cases[name].build()
    inputs = cases[name].inputs(head, gradient=True)
    torch._dynamo.reset()
    compiled = torch.compile(head, backend="aot_eager", fullgraph=True)
    expected = head(inputs.states, inputs.targets)
    loss = compiled(inputs.states, inputs.targets)
    torch.testing.assert_close(loss, expected)
    ours, theirs = gradients_of(loss, head, inputs), gradients_of(expected, head, inputs)
    for leaf, gradient in theirs.items():
        torch.testing.assert_close(ours[leaf], gradient, msg=lambda m, n=leaf: f"{n}: {m}")


def margin_of(log_probs: Tensor, target: int) -> tuple[Tensor, Tensor]:
    """How far the target is above all others together, and these, in nats."""
    others = log_probs.index_fill(-1, torch.tensor([target]), -torch.inf).logsumexp(-1)
    return log_probs[..., target] - others, others


def at_margin(case: Any, margin: float, target: int) -> tuple[Head, Any]:
    """A head whose least confident token has the target so many nats above all others, by its bias."""
    head = case.build(bias=True, **case.smooth).double()
    inputs = case.inputs(head, dtype=torch.float64, gradient=True)
    with torch.no_grad():
        # A score moves its margin by between about half and three times as much, whatever bends it.
        for _ in range(12):
            found, _ = margin_of(head(inputs.states, **inputs.context), target)
            head.decoder.bias[target] += 0.6 * (margin - found.min())
    return head, inputs


@pytest.mark.parametrize("margin", [1.0, 20.0, 40.0, 100.0])
def test_a_confident_token_keeps_its_digits(case: Any, margin: float) -> None:
    """-log p = -log(1 - q) with q what all others have, of which fp64 knows the logarithm to 16 digits."""
    head, inputs = at_margin(case, margin, 3)
    found, others = margin_of(head(inputs.states, **inputs.context), 3)
    assert found.min().item() == pytest.approx(margin, rel=0.2)
    exact = -torch.log1p(-others.exp())
    targets = torch.full_like(inputs.targets, 3)
    loss = head(inputs.states, targets, **inputs.context, reduction="none")
    # The primitive adds up the shares of several rows, which are 1 but for their rounding.
    floor = 1e-15 if case.mixed_by_the_primitive else 0.0
    torch.testing.assert_close(loss, exact, rtol=1e-12, atol=floor)
    ours, theirs = gradients_of(loss.sum(), head, inputs), gradients_of(exact.sum(), head, inputs)
    for name, gradient in theirs.items():
        assert gradient.norm() > 0, name
        difference = (ours[name] - gradient).norm()
        assert difference <= 1e-11 * gradient.norm() + 20 * floor, name


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_a_masked_target_of_weight_0_counts_nothing(case: Any, reduction: str) -> None:
    head = case.build(bias=True)
    with torch.no_grad():
        head.decoder.bias[7] = -torch.inf
    inputs = case.inputs(head, gradient=True)
    targets = inputs.targets.masked_fill(inputs.targets == 7, 3)
    targets[1, 2] = 7
    weight = torch.ones(targets.shape)
    weight[1, 2] = 0.0
    options = {**inputs.context, "reduction": reduction}
    ignored = targets.masked_fill(targets == 7, -100)
    loss = head(inputs.states, targets, **options, token_weight=weight)
    expected = head(inputs.states, ignored, **options)
    assert bool(torch.isinf(head(inputs.states, targets, **inputs.context, reduction="none")[1, 2]))
    torch.testing.assert_close(loss, expected)
    ours, theirs = gradients_of(loss.sum(), head, inputs), gradients_of(expected.sum(), head, inputs)
    for name, gradient in theirs.items():
        torch.testing.assert_close(ours[name], gradient, msg=lambda m, n=name: f"{n}: {m}")


ROW_HEADS = ("softmax", "sigsoftmax", "moc", "mos", "trunk", "doc")


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("name", ROW_HEADS)
def test_normalisers_leave_out_tokens_of_weight_0(cases: dict[str, Any], name: str, reduction: str) -> None:
    """One of them has an infinite loss, another an arbitrary target."""
    head = cases[name].build(bias=True)
    with torch.no_grad():
        head.decoder.bias[7] = -torch.inf
    inputs = cases[name].inputs(head, gradient=True)
    targets = inputs.targets.masked_fill(inputs.targets == 7, 3)
    weight = torch.full(targets.shape, 2.0)
    targets[1, 2], weight[1, 2], weight[0, 1] = 7, 0.0, 0.0
    ignored = targets.masked_fill(weight == 0, -100)
    (loss, size), (expected, expected_size) = (
        head(inputs.states, y, reduction=reduction, token_weight=weight, return_normaliser=True)
        for y in (targets, ignored)
    )
    plain = head(inputs.states, targets, reduction=reduction, token_weight=weight)
    torch.testing.assert_close(loss, plain)
    torch.testing.assert_close((loss, size), (expected, expected_size))
    ours, theirs, without = (
        gradients_of(value, head, inputs)
        for value in (loss.sum() + 0.3 * size, expected.sum() + 0.3 * expected_size, plain.sum())
    )
    penalty = gradients_of(0.3 * head(inputs.states, ignored, return_normaliser=True)[1], head, inputs)
    for leaf, gradient in theirs.items():
        assert gradient.isfinite().all(), leaf
        torch.testing.assert_close(ours[leaf], gradient)
        torch.testing.assert_close(ours[leaf], without[leaf] + penalty[leaf], rtol=1e-4, atol=1e-6)


def test_normalisers_leave_out_whatever_an_ignored_state_holds() -> None:
    """The states are the rows: a NaN among them would reach W."""
    head = build("softmax", hidden=4, vocab=9, bias=True)
    states, targets = torch.randn(6, 4), torch.randint(9, (6,))
    targets[2] = -100
    states[2] = torch.nan
    loss, size = head(states, targets, return_normaliser=True)
    (loss + size).backward()
    counted = targets != -100
    expected, expected_size = head(states[counted], targets[counted], return_normaliser=True)
    torch.testing.assert_close((loss, size), (expected, expected_size))
    gradients = torch.autograd.grad(expected + expected_size, list(head.decoder.parameters()))
    for parameter, gradient in zip(head.decoder.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_mixture_hands_out_its_prior_with_the_loss(case: Any, reduction: str) -> None:
    """From the pass that made the loss, whichever that was, so that a penalty on it reaches the gates."""
    head = case.build()
    inputs = case.inputs(head)
    loss, log_prior = head(
        inputs.states, inputs.targets, **inputs.context, reduction=reduction, return_prior=True
    )
    torch.testing.assert_close(
        loss, head(inputs.states, inputs.targets, **inputs.context, reduction=reduction)
    )
    assert (log_prior is not None) is head.mixture
    if log_prior is None:
        return
    assert log_prior.shape[0] == inputs.targets.numel()
    torch.testing.assert_close(log_prior.exp().sum(-1), torch.ones(inputs.targets.numel()))
    assert log_prior.exp().std(0).max() > 0.01
    gates = [one for name, one in head.named_parameters() if name in ("contexts.gate.weight", "prior.weight")]
    (gradient,) = torch.autograd.grad(log_prior.exp().sum(0).var(), gates)
    assert gradient.abs().max() > 0


def wrong(case: Any, what: str) -> tuple[tuple[Any, ...], dict[str, Any], str]:
    """Arguments of forward with one thing wrong, and what the message must name."""
    head = case.build()
    inputs = case.inputs(head)
    each = inputs.each
    states: Any = inputs.states
    targets: Any = inputs.targets
    options: dict[str, Any] = dict(inputs.context)
    if what == "one state too many":
        states, expected = [*each, each[0]], rf"{len(each) + 1} hidden states, expected {len(each)}"
    elif what == "no state":
        states, expected = [], rf"0 hidden states, expected {len(each)}"
    elif what == "wrong width":
        states = [*each[:-1], each[-1][..., 1:]]
        expected = rf"\[2, 3, {each[-1].shape[-1] - 1}\].*widths \[.*{each[-1].shape[-1]}\]"
    elif what == "no leading shape":
        states, expected = [state[0, 0] for state in each], rf"\[{each[0].shape[-1]}\].*expected"
    elif what == "targets of another shape":
        targets, expected = targets.t(), r"targets have shape \[3, 2\], expected \[2, 3\]"
    elif what == "float targets":
        targets, expected = targets.float(), r"torch.float32, expected int64"
    elif what == "target outside the vocabulary":
        targets, expected = torch.full_like(targets, head.vocab), rf"target {head.vocab} .*V={head.vocab}"
    elif what == "weights of another shape":
        options["token_weight"] = torch.ones(3, 2)
        expected = r"token_weight has shape \[3, 2\], expected.*\[2, 3\]"
    else:
        options["reduction"], expected = "average", r"reduction='average'.*mean, sum, none"
    return (head, states, targets), options, expected


WRONG = (
    "one state too many",
    "no state",
    "wrong width",
    "no leading shape",
    "targets of another shape",
    "float targets",
    "target outside the vocabulary",
    "weights of another shape",
    "unknown reduction",
)


def test_wrong_arguments_are_named(case: Any) -> None:
    for what in WRONG:
        (head, states, targets), options, expected = wrong(case, what)
        with pytest.raises(FullrankError, match=expected):
            head(states, targets, **options)


def test_states_must_share_their_leading_shape(cases: dict[str, Any]) -> None:
    head = cases["doc"].build()
    with pytest.raises(FullrankError, match=r"\[2, 3, 6\], \[2, 4, 5\].*one leading shape"):
        head([torch.zeros(2, 3, 6), torch.zeros(2, 4, 5)])


def test_a_head_that_points_at_tokens_asks_for_them(cases: dict[str, Any]) -> None:
    heads = [case.build() for case in cases.values()]
    pointing = [head for head in heads if head.needs_context]
    assert [head.name for head in pointing] == ["pointer", "cache", "cache"]
    for head in pointing:
        with pytest.raises(FullrankError, match=r"context=input_ids.*\[2, 3\]"):
            head(torch.zeros(2, 3, 6), torch.zeros(2, 3, dtype=torch.long))
