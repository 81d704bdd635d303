"""The external store: exact search whatever the chunks, and the head that reads it against a loop."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fullrank.errors import FullrankError
from fullrank.heads import CacheHead, Store, build, store

H, V = 4, 9
IDS = torch.tensor([[5, 2, 5, 5], [8, 1, -1, 8]])


def make(**options: object) -> CacheHead:
    torch.manual_seed(0)
    head = build("cache", hidden=H, vocab=V, **options).double()
    assert isinstance(head, CacheHead)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.5)
    return head


def entries(count: int = 50) -> Store:
    generator = torch.Generator().manual_seed(3)
    keys = torch.randn(count, H, generator=generator, dtype=torch.float64)
    return Store(keys, torch.randint(V, (count,), generator=generator))


def states() -> Tensor:
    return torch.randn(2, 4, H, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@pytest.mark.parametrize("chunk", [1, 7, 50, 1000])
def test_search_is_exact_in_any_chunks(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "CHUNK", chunk)
    held, queries = entries(), states().flatten(0, 1)
    scores, places = held.search(queries, 6)
    expected = torch.topk(queries @ held.keys.T, 6)
    torch.testing.assert_close(scores, expected.values)
    assert torch.equal(places, expected.indices)


def test_a_store_with_too_little_in_it() -> None:
    scores, places = entries(2).search(states().flatten(0, 1), 5)
    assert bool(torch.isneginf(scores[:, 2:]).all())
    assert bool((places[:, 2:] == -1).all())
    head = make()
    plain = head(states(), context=IDS)
    head.attach(Store.empty(H, dtype=torch.float64), neighbours=3)
    torch.testing.assert_close(head(states(), context=IDS), plain)
    loss = head(states(), IDS.clamp_min(0), context=IDS)
    loss.backward()
    assert bool(torch.isfinite(loss))


@pytest.mark.parametrize("neighbours", [3, 50, 80])
@pytest.mark.parametrize("maps", [False, True])
def test_the_head_reads_the_nearest_entries(neighbours: int, maps: bool) -> None:
    head, held = make(maps=maps), entries()
    head.attach(held, neighbours=neighbours)
    hidden = states().requires_grad_()
    found = head(hidden, context=IDS)
    plain = states()
    base = head.base(plain).detach()
    normaliser = torch.logsumexp(plain @ head.decoder.weight.detach().T, -1)
    weight = float(head.memory_weight.detach())
    for b in range(2):
        for t in range(4):
            query = plain[b, t] if head.query is None else head.query(plain[b, t]).detach()
            mass = [math.exp(float(base[b, t, v] + normaliser[b, t])) for v in range(V)]
            for i in range(t):
                if int(IDS[b, i]) >= 0 and int(IDS[b, i + 1]) >= 0:
                    key = plain[b, i] if head.key is None else head.key(plain[b, i]).detach()
                    mass[int(IDS[b, i + 1])] += math.exp(weight + float(query @ key) / head.temperature)
            if int(IDS[b, t]) < 0:
                continue  # padding asks for nothing
            scores = sorted(
                ((float(query @ key), int(token)) for key, token in zip(held.keys, held.tokens, strict=True)),
                reverse=True,
            )
            for score, token in scores[:neighbours]:
                mass[token] += math.exp(weight + score / head.temperature)
            expected = torch.tensor([math.log(m / sum(mass)) for m in mass], dtype=torch.float64)
            torch.testing.assert_close(found[b, t].detach(), expected, rtol=1e-9, atol=1e-9)
    targets = torch.tensor([[2, 5, 5, 1], [1, -100, -100, 3]])
    counted = targets >= 0
    leaves = [hidden, *head.parameters()]
    chosen = found[counted].gather(1, targets[counted][:, None])
    written = torch.autograd.grad(-chosen.mean(), leaves)
    fused = torch.autograd.grad(head(hidden, targets, context=IDS), leaves)
    for ours, theirs in zip(fused, written, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-11)
    head.attach(None)
    assert not torch.allclose(head(hidden, context=IDS), found)


def test_it_is_filled_with_what_the_head_would_remember(tmp_path: Path) -> None:
    head = make(maps=True)
    held = Store.empty(H, dtype=torch.float64)
    held.add(head, states(), context=IDS)
    # Three steps of the first sequence; of the second one, the others have padding on a side.
    assert held.tokens.tolist() == [2, 5, 5, 1]
    torch.testing.assert_close(held.keys[0], head.key(states()[0, 0]).detach())
    file = tmp_path / "store.safetensors"
    held.save(file)
    again = Store.load(file)
    assert torch.equal(again.keys, held.keys)
    assert torch.equal(again.tokens, held.tokens)
    with pytest.raises(FullrankError, match=r"missing.safetensors is no store.*Store.save"):
        Store.load(tmp_path / "missing.safetensors")
    file.write_bytes(b"no store")
    with pytest.raises(FullrankError, match="is no store"):
        Store.load(file)


def test_a_store_in_place_of_the_past_is_the_past() -> None:
    """A prefix put into a store, all of it searched, says what the same prefix says as a carried memory."""
    head = make()
    prefix, segment = states()[:1, :3], states()[1:, :1]
    ids = IDS[:1, :3]
    memory = head.remember(prefix, context=ids)
    # The last state of the prefix waits for the next id, which a store cannot know: leave it without one.
    carried = head(segment, context=torch.tensor([[-1]]), memory=memory)
    held = Store.empty(H, dtype=torch.float64)
    held.add(head, prefix, context=ids)
    head.attach(held, neighbours=len(held))
    assert torch.allclose(head(segment, context=torch.tensor([[3]])), carried) is False
    head.attach(None)
    known = head(segment, context=torch.tensor([[3]]), memory=memory)
    head.attach(
        Store(torch.cat([held.keys, prefix[0, -1:]]), torch.tensor([*held.tokens.tolist(), 3])), neighbours=9
    )
    torch.testing.assert_close(head(segment, context=torch.tensor([[3]])), known)


def test_an_index_without_faiss_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "faiss", None)
    with pytest.raises(FullrankError, match=r"fullrank\[memory\]"):
        entries().index()


def test_an_index_that_looks_everywhere_is_exact() -> None:
    pytest.importorskip("faiss")
    held, queries = entries(), states().flatten(0, 1)
    exact = held.search(queries, 5)
    held.index(cells=1)
    scores, places = held.search(queries, 5)
    assert torch.equal(places, exact[1])
    torch.testing.assert_close(scores, exact[0], rtol=1e-5, atol=1e-5)


def test_stores_that_cannot_be() -> None:
    with pytest.raises(FullrankError, match=r"\[3, 2\].*\[2\]"):
        Store(torch.zeros(3, 2), torch.zeros(2, dtype=torch.long))
    with pytest.raises(FullrankError, match="float32"):
        Store(torch.zeros(3, 2), torch.zeros(3))
