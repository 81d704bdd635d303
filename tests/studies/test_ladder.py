"""The ladder: a language of the rank it claims, the same data for all, floors that hold."""

import dataclasses

import pytest
import torch

from fullrank.errors import FullrankError
from fullrank.studies import ladder

SMALL = ladder.Config(
    contexts=32,
    vocabulary=16,
    rank=6,
    width=2,
    components=4,
    steps=300,
    seed=3,
    heads=("moc", "mos", "trunk"),
)


@pytest.mark.parametrize(
    ("rank", "contexts", "vocabulary"), [(2, 20, 5), (12, 64, 32), (9, 9, 30), (11, 40, 12)]
)
def test_language_has_the_rank_it_claims(rank: int, contexts: int, vocabulary: int) -> None:
    truth = ladder.language(
        dataclasses.replace(SMALL, rank=rank, contexts=contexts, vocabulary=vocabulary, width=1)
    )
    assert torch.allclose(truth.exp().sum(1), torch.ones(contexts, dtype=torch.float64))
    values = torch.linalg.svdvals(truth - truth.mean(1, keepdim=True))
    assert values[rank - 1] > 1e-3
    assert rank == min(contexts, vocabulary - 1) or values[rank] < 1e-10


def test_a_width_that_suffices_is_refused() -> None:
    with pytest.raises(FullrankError, match="--width 6 holds no softmax back"):
        dataclasses.replace(SMALL, width=6)


@pytest.mark.slow(reason="fits every rung, ten seconds; the demo's ladder runs in the default tier")
def test_ladder_breaks_the_bottleneck() -> None:
    shares: list[float] = []
    record = ladder.run(SMALL, lambda label, share: shares.append(share))
    assert shares == sorted(shares)
    assert record.least_rank == 6
    by_name = {(item.head, item.width): item for item in record.rungs}
    softmax = [item for item in record.rungs if item.head == "softmax"]
    assert [item.width for item in softmax] == [2, 4, 6, 8]
    for item in softmax:
        assert item.kl >= item.floor
        assert item.least_rank <= item.width
    assert softmax[0].floor > softmax[1].floor > 0.01
    assert softmax[2].floor < 1e-9
    # Mixing contexts stays under the width and so above the floor; mixing distributions does not.
    assert by_name["moc", 2].least_rank <= 2
    assert by_name["moc", 2].kl >= softmax[0].floor
    assert by_name["mos", 2].least_rank > 6
    assert by_name["mos", 2].kl < softmax[0].floor
    assert by_name["trunk", 2].kl < softmax[0].floor


@pytest.mark.slow
def test_ladder_repeats_with_its_seed() -> None:
    short = dataclasses.replace(SMALL, steps=3, heads=ladder.HEADS)
    first, second, other = (
        ladder.run(config) for config in (short, short, dataclasses.replace(short, seed=4))
    )
    assert [item.kl for item in first.rungs] == [item.kl for item in second.rungs]
    assert [item.kl for item in first.rungs] != [item.kl for item in other.rungs]
