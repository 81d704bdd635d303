"""Splitting a head's rows: the theorem, its null, and directions that lead somewhere."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fullrank.fit import split_heads, split_training, splitting
from fullrank.fit.states import Part
from fullrank.heads.mixture import MixtureHead
from tests.fit.planted import D, V, split_rows_gathered, split_rows_setting, student_of


def _moments(weight: Tensor, row: Tensor, target: int) -> tuple[Tensor, Tensor]:
    """g and H of one token."""
    p = torch.softmax(weight @ row, dim=0)
    mean = weight.T @ p
    centred = weight - mean
    return weight[target] - mean, centred.T @ (p[:, None] * centred)


@settings(max_examples=50)
@given(seed=st.integers(0, 10_000), width=st.integers(1, 8), vocab=st.integers(2, 30))
def test_statement_16_a_split_gains_what_its_second_derivative_says(
    seed: int, width: int, vocab: int
) -> None:
    draw = torch.Generator().manual_seed(seed)
    weight = torch.randn(vocab, width, generator=draw, dtype=torch.float64)
    row, direction = torch.randn(2, width, generator=draw, dtype=torch.float64)
    target = seed % vocab
    g, H = _moments(weight, row, target)
    expected = 0.5 * float((g @ direction) ** 2 - direction @ H @ direction)

    def log_mixture(step: float) -> float:
        both = torch.stack([row + step * direction, row - step * direction])
        found = torch.log_softmax(both @ weight.T, dim=1)[:, target]
        return float(found.logsumexp(0)) - math.log(2)

    before = log_mixture(0.0)
    # What is left is of fourth order: a step of half the size leaves a sixteenth of it, or where that happens
    # to vanish what is of sixth.
    left = [log_mixture(step) - before - expected * step**2 for step in (0.02, 0.01)]
    sixth = (0.02 * float((weight @ direction).abs().max())) ** 6
    assert abs(left[1]) <= abs(left[0]) / 8 + sixth + 1e-12
    # No first derivative: the two sides of a step are one.
    assert log_mixture(0.01) == pytest.approx(log_mixture(-0.01), abs=1e-14)


@settings(max_examples=30)
@given(seed=st.integers(0, 10_000))
def test_statement_17_a_right_model_has_no_direction_to_split_along(seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    weight = torch.randn(V, D, generator=draw, dtype=torch.float64)
    row = torch.randn(D, generator=draw, dtype=torch.float64)
    p = torch.softmax(weight @ row, dim=0)
    expected = torch.zeros(D, D, dtype=torch.float64)
    for target in range(V):
        g, H = _moments(weight, row, target)
        expected += p[target] * torch.outer(g, g)
    torch.testing.assert_close(expected, H)


@pytest.mark.parametrize("components", [2, 3, 4, 8])
def test_codes_move_components_along_all_directions_and_their_mean_along_none(components: int) -> None:
    codes = split_heads.codes(components)
    assert codes.shape == (components, components - 1)
    torch.testing.assert_close(codes.sum(dim=0), torch.zeros(components - 1, dtype=torch.float64))
    torch.testing.assert_close(codes.T @ codes / components, torch.eye(components - 1, dtype=torch.float64))


def cosine_to_the_planted(direction: Tensor) -> float:
    """The planted direction turns with the state: d = M x with M the roll of the entries."""
    return abs(
        float(torch.cosine_similarity(direction.flatten(), torch.eye(D).roll(1, dims=0).flatten(), dim=0))
    )


@pytest.mark.parametrize("softcap", [None, 8.0])
def test_directions_are_found_where_rows_are_split(softcap: float | None) -> None:
    setting = split_rows_setting(0.6, softcap=softcap)
    directions = splitting.search(split_rows_gathered(0.6, softcap=softcap))
    assert directions.sure >= 1
    assert directions.found[0] > 1.5 * directions.null
    assert cosine_to_the_planted(directions.maps[0]) > 0.9
    head = student_of(setting.plain, components=2)
    started, scale, gain = split_heads.apart(setting, head, directions)
    assert scale > 0
    assert gain.low > 0.01
    held_out = setting.parts.held_out
    before, after = (mixture(list(held_out.states), held_out.targets) for mixture in (head, started))
    assert after < before - 0.01


def test_no_direction_is_sure_where_the_model_is_right() -> None:
    directions = splitting.search(split_rows_gathered(0.0))
    assert directions.sure == 0
    assert directions.found[0] < 1.5 * directions.null


def test_an_eigenvector_of_a_few_tokens_ranks_behind_directions_that_gain() -> None:
    draw = torch.Generator().manual_seed(0)

    def moments(odd: int) -> splitting.Moments:
        """Scores that vary more than they should along the first row as the first state does, and so many
        that lie far out along the second as the third does."""
        x = torch.cat([torch.ones(8192, 1), torch.randn(8192, 3, generator=draw)], dim=1)
        scores = torch.randn(8192, 3, generator=draw)
        scores[:, 0] += 0.7 * x[:, 1] * torch.randn(8192, generator=draw)
        scores[:odd, 1] = 12 * x[:odd, 3].abs()
        return splitting.Moments(
            states=x, scores=scores, drawn=torch.randn(8192, 16, 3, generator=draw),
            blocks=torch.arange(8192) // 128,
        )  # fmt: skip

    find, judge = moments(32), moments(0)
    basis = splitting.Basis(rows=torch.eye(3), states=torch.eye(3), mean=torch.zeros(3))
    gathered = splitting.Gathered(find=find, judge=judge, basis=basis, within=(find, judge))
    directions = splitting.search(gathered)
    # The first row splits along any of the four, best as the first state does.
    assert directions.sure == 4
    assert abs(float(directions.maps[0][0, 0])) > 0.9
    assert directions.found[4] == max(directions.found) > directions.found[0]
    assert abs(float(directions.maps[4][1, 2])) > 0.9


def test_unlikely_tokens_do_not_hide_a_direction() -> None:
    setting = split_rows_setting(0.6)
    draw = torch.Generator().manual_seed(5)

    def odd(part: Part) -> Part:
        least = (part.states[0] @ setting.plain.decoder.weight.T).argmin(dim=-1)
        chosen = torch.rand(part.targets.shape, generator=draw) < 0.01
        return dataclasses.replace(part, targets=torch.where(chosen, least, part.targets))

    parts = dataclasses.replace(setting.parts, fit=odd(setting.parts.fit), choose=odd(setting.parts.choose))
    directions = splitting.search(splitting.gather(dataclasses.replace(setting, parts=parts), tokens=10_000))
    # 0.89 where their scores are not cut.
    assert cosine_to_the_planted(directions.maps[0]) > 0.93
    assert directions.sure >= 1


def test_tokens_beyond_the_memory_limit_are_stored_in_the_basis(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(splitting, "WIDTH", 3)
    setting = dataclasses.replace(split_rows_setting(0.6), limit=8 * splitting.DRAWN * D * 500)
    gathered = splitting.gather(setting, tokens=10_000)
    assert len(gathered.within[0].states) > 1.5 * len(gathered.find.states)
    # States before drawn tokens, as far as the room goes.
    tokens, drawn_each, width = gathered.within[0].drawn.shape
    assert (drawn_each, width) == (splitting.FEWEST, 4)
    assert tokens * drawn_each <= setting.limit // (8 * splitting.WIDTH)
    # Whatever they are kept in, tokens from the model itself have the identity for their moments.
    drawn = (gathered.find.drawn @ gathered.basis.rows).flatten(0, 1)
    torch.testing.assert_close(drawn.T @ drawn / len(drawn), torch.eye(4), atol=0.02, rtol=0)
    directions = splitting.search(gathered)
    assert directions.sure >= 1
    assert directions.tokens == len(gathered.within[0].states)


def test_training_within_the_basis_finds_what_the_eigenvectors_miss() -> None:
    """From directions that lead nowhere to what the leading ones gain, or more."""
    setting = split_rows_setting(0.6, windows=70)
    head = student_of(setting.plain, components=2)
    assert isinstance(head, MixtureHead)
    directions = splitting.search(splitting.gather(setting, tokens=10_000))
    # The leading ones, of other rows than they were found for.
    wrong = directions.inner.roll(1, dims=1)
    maps, shifts = splitting.in_units(directions.basis, wrong)
    lost = dataclasses.replace(directions, inner=wrong, maps=maps, shifts=shifts)
    before = float(split_heads.choose_losses(setting, head).mean())
    stepped, scale, _ = split_heads.apart(setting, head, lost)
    learnt = split_training.trained(setting, head, lost, scale)
    right, _, _ = split_heads.apart(setting, head, directions)
    by_steps, by_training, by_eigenvectors = (
        before - float(split_heads.choose_losses(setting, mixture).mean())
        for mixture in (stepped, learnt, right)
    )
    assert by_training > 2 * by_steps
    assert by_training > 0.9 * by_eigenvectors
    # W and the mean row are where they were.
    assert learnt.decoder.weight is head.decoder.weight
    states = [torch.randn(5, D)]
    torch.testing.assert_close(
        learnt.rows(states)[0].mean(1), head.rows(states)[0].mean(1), atol=1e-5, rtol=0
    )


def test_a_trunk_is_split_in_the_private_part_of_its_rows() -> None:
    directions = splitting.search(split_rows_gathered(0.6), own=2)
    assert directions.maps.shape[1:] == (2, D)
    head = student_of(split_rows_setting(0.6).plain, "trunk", components=2, private=2)
    moved = split_heads.split(head, directions, 0.5)
    rows, log_prior = moved.rows([torch.randn(5, D)])
    # All components share the other entries.
    torch.testing.assert_close(rows[:, 0, : D - 2], rows[:, 1, : D - 2])
    assert not torch.allclose(rows[:, 0], rows[:, 1])
    torch.testing.assert_close(log_prior.exp(), torch.full((5, 2), 0.5))
