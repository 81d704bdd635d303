"""The cache head against a loop written from its definition, over every base; its memory in all its forms."""

from __future__ import annotations

import copy
import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fullrank.errors import FullrankError
from fullrank.heads import CacheHead, Memory, Store, build
from fullrank.heads.softmax import Softmax

H, V = 4, 9
IDS = torch.tensor([[5, 2, 5, 5, 7, 2, 5], [8, 1, 0, 8, 1, 1, 3]])
TARGETS = torch.tensor([[2, 5, 5, 7, 2, 5, 2], [1, 0, 8, 1, 1, 3, -100]])
B, TIME = IDS.shape
BASES: dict[str, dict[str, Any]] = {
    "softmax": {},
    "low_rank": {"rank": 2},
    "moc": {"components": 3},
    "mos": {"components": 3},
    "trunk": {"components": 2, "private": 2},
    "sigsoftmax": {},
    "moss": {"components": 2},
    "plif": {"bins": 20, "limit": 4.0},
    "mixtape": {"components": 2, "gate_width": 2},
    "doc": {"layers": ((H, 2), (3, 1))},
    "facets": {"layers": 2, "positions": 2, "partitions": 2, "softmaxes": 2},
    "pointer": {"rerank": (4,)},
}


def make(base: str = "softmax", *, warm: bool = True, bias: bool = False, **options: Any) -> CacheHead:
    torch.manual_seed(0)
    head = build(
        "cache", hidden=H, vocab=V, bias=bias, base=base, base_options=BASES[base], **options
    ).double()
    if warm:
        with torch.no_grad():
            for parameter in head.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.6)
    assert isinstance(head, CacheHead)
    return head


def states_for(head: CacheHead, *, time: int = TIME, gradient: bool = False) -> list[Tensor]:
    generator = torch.Generator().manual_seed(4)
    return [
        torch.randn(B, time, width, generator=generator, dtype=torch.float64).requires_grad_(gradient)
        for width in head.state_widths
    ]


def base_scores(head: CacheHead, states: list[Tensor], ids: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities of the base and its normaliser, from the definitions of each kind."""
    log_probs = head.base(states, context=ids)
    normaliser = torch.zeros(log_probs.shape[:-1], dtype=torch.float64)
    if hasattr(head.base, "rows") and not head.normalised:
        rows, log_prior = head.base.rows(states)
        scores = rows @ head.decoder.weight.T
        scores = head.base.pointwise(scores if head.decoder.bias is None else scores + head.decoder.bias)
        each = scores.exp().sum(-1)
        share = torch.ones_like(each) if log_prior is None else log_prior.exp()
        normaliser = (share * each).sum(-1).log()
    return log_probs, normaliser


@torch.no_grad()
def slow(
    head: CacheHead,
    states: list[Tensor],
    ids: Tensor,
    *,
    extra: list[tuple[Tensor, int]] | None = None,
    base: bool = True,
) -> Tensor:
    """One position, one memory and one token at a time. `extra` are (key, token) that everyone sees."""
    log_probs, normaliser = base_scores(head, states, ids)
    out = torch.full_like(log_probs, -math.inf)
    weight = float(head.memory_weight)
    for b in range(ids.shape[0]):
        for t in range(ids.shape[1]):
            state = states[0][b, t]
            query = state if head.query is None else head.query(state)
            mass = [math.exp(float(log_probs[b, t, v] + normaliser[b, t])) if base else 0.0 for v in range(V)]
            entries = list(extra or [])
            for i in range(t):
                if head.window is not None and i < t - head.window:
                    continue
                if int(ids[b, i]) < 0 or int(ids[b, i + 1]) < 0 or int(ids[b, t]) < 0:
                    continue
                key = states[0][b, i] if head.key is None else head.key(states[0][b, i])
                entries.append((key, int(ids[b, i + 1])))
            for key, token in entries:
                score = float(query @ key)
                if head.cosine:
                    score *= H / float(query.norm() * key.norm())
                mass[token] += math.exp(weight + score / head.temperature)
            total = sum(mass)
            for v in range(V):
                if mass[v] > 0:
                    out[b, t, v] = math.log(mass[v] / total)
    return out


@pytest.mark.parametrize("base", BASES)
def test_the_definition_over_every_base(base: str) -> None:
    head = make(base)
    states = states_for(head)
    with torch.no_grad():
        expected = slow(head, states, IDS)
        torch.testing.assert_close(head(states, context=IDS), expected, rtol=1e-9, atol=1e-9)
        for v in range(V):
            losses = head(states, torch.full_like(IDS, v), context=IDS, reduction="none")
            torch.testing.assert_close(losses, -expected[..., v], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    "options",
    [
        {"bias": True},
        {"maps": True},
        {"window": 2, "temperature": 0.7},
        {"normalised": True, "memory_weight": -1.0},
        {"base": "mos", "normalised": True},
        {"cosine": True, "maps": True, "window": 3},
    ],
    ids=str,
)
@pytest.mark.parametrize("ids", [IDS, IDS.masked_fill(IDS == 5, -1)], ids=["ids", "with padding"])
def test_the_definition_with_every_option(options: dict[str, Any], ids: Tensor) -> None:
    head = make(**options)
    states = states_for(head)
    with torch.no_grad():
        expected = slow(head, states, ids)
        torch.testing.assert_close(head(states, context=ids), expected, rtol=1e-9, atol=1e-9)
        losses = head(states, TARGETS, context=ids, reduction="none")
        chosen = -expected.gather(-1, TARGETS.clamp_min(0)[..., None])[..., 0]
        torch.testing.assert_close(losses, chosen.masked_fill(TARGETS < 0, 0.0), rtol=1e-9, atol=1e-9)
        alone = slow(head, states, ids, base=False)
        torch.testing.assert_close(head.cache_only(states, context=ids), alone, rtol=1e-9, atol=1e-9)


def test_the_published_form_by_hand() -> None:
    """Two tokens were remembered, one of them twice, and z is 0 for everything but one token."""
    head = CacheHead(Softmax(hidden=2, vocab=4))
    with torch.no_grad():
        head.decoder.weight.zero_()
        head.decoder.weight[3, 0] = 1.0
    root = math.sqrt(2)
    states = torch.tensor([[[root, 0.0], [0.0, root], [root, 0.0], [root, 0.0]]])
    # Entries: (h_0, 1), (h_1, 2), (h_2, 1); the query at the end is h_3 = h_0 = h_2.
    found = head(states, context=torch.tensor([[0, 1, 2, 1]]))[0, -1]
    same, other = math.exp(2 / root), 1.0
    mass = [1.0, 1.0 + 2 * same, 1.0 + other, math.exp(root)]
    torch.testing.assert_close(found.detach(), torch.tensor([m / sum(mass) for m in mass]).log())


@pytest.mark.parametrize("cosine", [False, True])
@pytest.mark.parametrize("base", ["softmax", "mos", "plif", "mixtape", "facets"])
def test_gradients_are_those_of_the_log_probabilities(base: str, cosine: bool) -> None:
    head = make(base, maps=True, window=4, cosine=cosine)
    states = states_for(head, gradient=True)
    counted = TARGETS >= 0
    leaves = [*states, *head.parameters()]
    chosen = head(states, context=IDS)[counted].gather(1, TARGETS[counted][:, None])
    plain = torch.autograd.grad(-chosen.mean(), leaves)
    fused = torch.autograd.grad(head(states, TARGETS, context=IDS), leaves)
    for ours, theirs in zip(fused, plain, strict=True):
        assert theirs.abs().max() > 0
        torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-11)


def test_gradcheck_with_a_carried_memory() -> None:
    head = make(maps=True)
    carried = head.remember(states_for(head), context=IDS)
    names = [name for name, _ in head.named_parameters()]

    def loss(states: Tensor, *parameters: Tensor) -> Tensor:
        return torch.func.functional_call(
            head,
            dict(zip(names, parameters, strict=True)),
            (states, TARGETS),
            {"context": IDS, "memory": carried, "reduction": "none"},
        )

    leaves = [states_for(head)[0] * 0.5, *head.parameters()]
    assert torch.autograd.gradcheck(
        loss, [leaf.detach().clone().requires_grad_() for leaf in leaves], fast_mode=True
    )


def test_the_loss_makes_nothing_v_wide_per_token() -> None:
    vocab, tokens = 4000, 512
    head = CacheHead(Softmax(hidden=8, vocab=vocab))
    states = torch.randn(1, tokens, 8, requires_grad=True)
    ids = torch.randint(vocab, (1, tokens))
    sizes: list[int] = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            found = function(*args, **(kwargs or {}))
            for one in found if isinstance(found, tuple) else (found,):
                if isinstance(one, Tensor) and "fullrank" not in str(function):
                    sizes.append(one.untyped_storage().nbytes() // one.itemsize)
            return found

    with Watch():
        head(states, ids, context=ids).backward()
    # W's gradient is V D = 32,000, the scores of the memory in tiles T x L = 262,144; N V would be 2,048,000.
    assert max(sizes) <= tokens * tokens


def test_no_position_sees_what_comes_after_it_or_another_sequence() -> None:
    head = make("mos", maps=True)
    states = states_for(head)
    before = head(states, context=IDS)
    later, moved = IDS.clone(), [states[0].clone()]
    later[0, 3] = 8
    moved[0][0, 3] += 1.0
    for after in (head(states, context=later), head(moved, context=IDS)):
        same = (before == after).all(-1)
        assert bool(same[0, :3].all())
        assert bool(same[1].all())
        assert not bool(same[0, 3:].all())
    # The id at 3 is known to position 3: what followed state 2. Its own state is a memory from 4 on.
    assert not torch.equal(before[0, 3], head(states, context=later)[0, 3])


def test_labels_are_not_remembered() -> None:
    """Masked labels, as for a prompt, change no loss that counts; nor do other labels before."""
    head = make()
    states = states_for(head)
    masked = TARGETS.masked_fill(torch.arange(TIME) < TIME - 1, -100)
    whole = head(states, TARGETS, context=IDS, reduction="none")
    torch.testing.assert_close(head(states, masked, context=IDS, reduction="none")[0, -1], whole[0, -1])
    # And the copy in the context is credited: 2 was seen twice.
    assert float(head.cache_only(states, context=IDS)[0, -1, 2].exp()) > 0


@settings(max_examples=15, deadline=None)
@given(
    cuts=st.lists(st.integers(0, TIME), max_size=3),
    window=st.one_of(st.none(), st.integers(1, 5)),
    base=st.sampled_from(["softmax", "mos"]),
)
def test_segments_with_a_carried_memory_are_one_sequence(
    cuts: list[int], window: int | None, base: str
) -> None:
    head = make(base, window=window, maps=True)
    states = states_for(head)
    ids = IDS.masked_fill(IDS == 8, -1)
    whole = head(states, context=ids)
    losses = head(states, TARGETS, context=ids, reduction="none")
    memory: Memory | None = None
    bounds = sorted({0, *cuts, TIME})
    for start, stop in itertools.pairwise(bounds):
        part = slice(start, stop)
        segment = [state[:, part] for state in states]
        found = head(segment, context=ids[:, part], memory=memory)
        torch.testing.assert_close(found, whole[:, part], rtol=1e-9, atol=1e-9)
        loss = head(segment, TARGETS[:, part], context=ids[:, part], memory=memory, reduction="none")
        torch.testing.assert_close(loss, losses[:, part], rtol=1e-9, atol=1e-9)
        memory = head.remember(segment, context=ids[:, part], memory=memory)
        assert window is None or len(memory) <= window


def test_pieces_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    head = make("mos")
    states = states_for(head)
    whole = head(states, context=IDS)
    _, stats = head(states, TARGETS, context=IDS, return_stats=True)
    for tokens in (1, 3, 5, TIME, TIME + 1):
        monkeypatch.setattr("fullrank.heads.cache_scores.piece_tokens", lambda device, columns, n=tokens: n)
        torch.testing.assert_close(head(states, context=IDS), whole, rtol=1e-12, atol=1e-12)
        _, again = head(states, TARGETS, context=IDS, return_stats=True)
        for ours, theirs in zip(again, stats, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_nothing_remembered_leaves_the_base() -> None:
    head = make("mos")
    states = states_for(head)
    torch.testing.assert_close(head(states, context=IDS)[:, 0], head.base(states)[:, 0])
    nowhere = torch.full_like(IDS, -1)
    torch.testing.assert_close(head(states, context=nowhere), head.base(states))
    assert bool(torch.isneginf(head.cache_only(states, context=nowhere)).all())
    loss = head(states, TARGETS, context=nowhere)
    torch.testing.assert_close(loss, head.base(states, TARGETS))
    loss.backward()
    assert float(head.memory_weight.grad) == 0.0
    empty = Memory(keys=torch.zeros(B, 0, H, dtype=torch.float64), ids=IDS[:, :0])
    torch.testing.assert_close(head(states, context=IDS, memory=empty), head(states, context=IDS))
    assert len(head.remember(states, context=IDS, length=0)) == 0


def test_a_target_that_was_never_seen() -> None:
    head = make()
    states = states_for(head)
    never = torch.full_like(IDS, 6)
    losses = head(states, never, context=IDS, reduction="none")
    assert bool((losses[:, 1:] > head.base(states, never, reduction="none")[:, 1:]).all())
    assert bool(torch.isneginf(head.cache_only(states, context=IDS)[..., 6]).all())
    losses.sum().backward()
    assert all(bool(parameter.grad.isfinite().all()) for parameter in head.parameters())


def test_what_padding_holds_does_not_matter() -> None:
    head = make(maps=True)
    ids, targets = IDS.clone(), TARGETS.clone()
    ids[:, 4:], targets[:, 4:] = -1, -100
    losses = []
    for filling in (0.0, math.nan):
        states = states_for(head)[0]
        states[:, 4:] = filling
        head.zero_grad()
        losses.append(head(states, targets, context=ids))
        losses[-1].backward()
        assert all(bool(parameter.grad.isfinite().all()) for parameter in head.parameters())
    assert float(losses[0].detach()) == float(losses[1].detach())


def test_equal_components_give_what_one_of_them_gives() -> None:
    plain, mixture = make(warm=False), make("mos", warm=False)
    with torch.no_grad():
        plain.decoder.weight.copy_(mixture.decoder.weight)
    states = states_for(plain)
    torch.testing.assert_close(mixture(states, context=IDS), plain(states, context=IDS))


def test_a_light_memory_is_the_base_and_a_heavy_one_the_memory() -> None:
    head = make()
    states = states_for(head)
    with torch.no_grad():
        head.memory_weight.fill_(-60.0)
        torch.testing.assert_close(head(states, context=IDS), head.base(states))
        head.memory_weight.fill_(300.0)
        heavy, alone = head(states, context=IDS), head.cache_only(states, context=IDS)
    seen = torch.isfinite(alone)
    torch.testing.assert_close(heavy[seen], alone[seen], rtol=1e-9, atol=1e-9)


def test_a_confident_base_keeps_its_digits_in_fp32() -> None:
    head = CacheHead(Softmax(hidden=2, vocab=3), memory_weight=-60.0)
    with torch.no_grad():
        head.decoder.weight.copy_(torch.tensor([[12.0, 0.0], [-12.0, 0.0], [-12.0, 1.0]]))
    states, ids = torch.tensor([[[1.0, 0.5], [1.0, 0.5]]]), torch.zeros(1, 2, dtype=torch.long)
    exact = -copy.deepcopy(head).double()(states.double(), context=ids)[..., 0]
    loss = head(states, ids, context=ids, reduction="none")
    torch.testing.assert_close(loss.double(), exact, rtol=1e-5, atol=0)
    assert 0 < float(loss.detach().max()) < 1e-9


def test_w_is_one_matrix_under_one_name() -> None:
    head = make("mos")
    names = [name for name, _ in head.named_parameters()]
    assert names[0] == "memory_weight"
    assert "decoder.weight" in names
    assert sorted(head.state_dict()) == sorted(names)
    other = copy.deepcopy(head)
    assert other.base.decoder is other.decoder is not head.decoder
    decoder = torch.nn.Linear(H, 20, bias=False).double()
    other.replace_decoder(decoder)
    assert other(states_for(other), context=IDS).shape[-1] == other.vocab == 20
    embedding = torch.nn.Embedding(20, H).double()
    other.tie(embedding)
    other(states_for(other), TARGETS, context=IDS).backward()
    assert embedding.weight.grad is not None


def test_weights_saved_by_version_0_1_are_found_by_their_names() -> None:
    head = make("mos", bias=True, maps=True)
    saved = {
        "decoder.weight": (V, H), "decoder.bias": (V,), "memory_weight": (),
        "base.contexts.gate.weight": (3, H), "base.contexts.differences.0.weight": (3 * H, H),
        "base.contexts.differences.0.bias": (3 * H,),
        "query.weight": (H, H), "query.bias": (H,), "key.weight": (H, H), "key.bias": (H,),
    }  # fmt: skip
    head.load_state_dict({name: torch.randn(shape) for name, shape in saved.items()})
    assert {name: tuple(tensor.shape) for name, tensor in head.state_dict().items()} == saved


def test_the_base_reads_whatever_matrix_the_cache_holds() -> None:
    """Libraries wrap a layer to save it: the base must not go on with what it was built with."""
    head = make("mixtape")
    states = states_for(head)
    before = head(states, context=IDS)
    wrapped = torch.nn.Linear(H, V, bias=False).double()
    head.decoder = wrapped
    assert head.base.decoder is wrapped
    assert not torch.allclose(head(states, context=IDS), before, atol=1e-3)


def test_arguments_and_options_that_cannot_be() -> None:
    head = make()
    states = states_for(head)
    with pytest.raises(FullrankError, match=r"context=input_ids, \[2, 7\]"):
        head(states)
    with pytest.raises(FullrankError, match=r"\[14, 4\].*\[batch, time, H\]"):
        head(states[0].flatten(0, 1), context=IDS.flatten())
    with pytest.raises(FullrankError, match=rf"ids up to {V}.*V={V}"):
        head(states, context=IDS.masked_fill(IDS == 5, V))
    with pytest.raises(FullrankError, match=r"torch.float32"):
        head(states, context=IDS.float())
    memory = head.remember(states, context=IDS)
    with pytest.raises(FullrankError, match=r"\[1, 7, 4\].*\[2, M, 4\].*same sequences"):
        head(states, context=IDS, memory=memory.select(torch.tensor([0])))
    with pytest.raises(FullrankError, match=r"ids of \[2, 6\]"):
        Memory(keys=memory.keys, ids=memory.ids[:, 1:])
    for options, message in [
        ({"temperature": 0.0}, "temperature=0.0.*above 0"),
        ({"memory_weight": -math.inf}, "memory_weight=-inf.*finite"),
        ({"window": 0}, "window=0.*whole number >= 1"),
    ]:
        with pytest.raises(FullrankError, match=message):
            make(**options)
    with pytest.raises(FullrankError, match="base='cache'"):
        build("cache", hidden=4, vocab=5, base="cache")
    with pytest.raises(FullrankError, match=r"'sofmax'.*did you mean 'softmax'"):
        build("cache", hidden=4, vocab=5, base="sofmax")
    with pytest.raises(FullrankError, match="hidden, width, bias for it"):
        CacheHead(Softmax(hidden=4, vocab=5), hidden=3, width=9, bias=True)
    with pytest.raises(FullrankError, match="got a CacheHead as base"):
        CacheHead(make())
    with pytest.raises(FullrankError, match="width 3, expected 4"):
        head.attach(Store.empty(3))
