"""Unreachable tokens: planted inside the hull, twice in the matrix, or among the padding."""

import pytest
import torch

from fullrank.diagnose.questions.unreachable import unreachable
from fullrank.models.output_layer import OutputLayer
from fullrank.ops import Softcap


def healthy(V=120, D=16):
    """Gaussian rows of one length: every one a vertex of the sphere's hull."""
    weight = torch.randn(V, D, generator=torch.Generator().manual_seed(0))
    return weight / weight.norm(dim=1, keepdim=True)


def ask(weight, *, tokens=None, name=str, samples=1, seconds=None, **more):
    """The answer for an output layer, and the progress that was reported."""
    output = OutputLayer(weight=weight, tokens=tokens or len(weight), **more)
    reports = []
    found = unreachable(
        output, name, samples=samples, seconds=seconds,
        progress=lambda label, share: reports.append((label, share)),
    )  # fmt: skip
    assert found.argmaxable + len(found.never) + found.undecided == found.vocabulary == output.tokens
    assert found.seconds > 0
    assert all(0 <= share <= 1 for _, share in reports)
    assert reports[-1][0] == "capacity"
    return found


def ids(found):
    return [token.id for token in found.never]


def test_a_healthy_matrix_has_none():
    found = ask(healthy())
    assert (ids(found), found.undecided, found.duplicates, found.padding_never) == ([], 0, 0, 0)


def test_a_planted_inner_token_is_found_and_named():
    weight = healthy()
    weight[7] = weight[60:90].mean(dim=0)
    weight[55] = 0.02 * weight[5]
    found = ask(weight, name=lambda token: f"token {token}")
    assert [(token.id, token.text) for token in found.never] == [(7, "token 7"), (55, "token 55")]
    # Next to the origin is deeper than at the centre of a quarter of the rows.
    assert 0 < found.never[0].depth < found.never[1].depth <= 1
    assert (found.argmaxable, found.duplicates, found.undecided) == (118, 0, 0)


def test_the_mean_row_is_as_deep_as_can_be():
    weight = healthy()
    weight[0] = weight[1:].mean(dim=0)
    found = ask(weight)
    assert ids(found) == [0]
    assert found.never[0].depth == pytest.approx(1, abs=1e-3)


def test_duplicates_are_counted_apart():
    weight = healthy()
    weight[3] = weight[90]
    weight[8] = 0.2 * weight[5]
    found = ask(weight)
    assert (ids(found), found.duplicates) == ([3, 8, 90], 2)
    # A higher bias breaks the tie for one of them.
    bias = torch.zeros(120)
    bias[3] = 1.0
    found = ask(weight, bias=bias)
    assert 90 in ids(found)
    assert 3 not in ids(found)
    assert found.duplicates == 1


def test_padding_is_counted_apart_and_never_named():
    weight = torch.cat([healthy(), torch.zeros(10, 16)])
    weight[7] = 0.1 * weight[20]
    named = []
    found = ask(weight, tokens=120, name=lambda token: named.append(token) or "x")
    assert named == ids(found) == [7]
    assert (found.padding_never, found.duplicates, found.argmaxable) == (10, 0, 119)


def test_a_bias_can_lift_an_inner_token_out_and_a_soft_cap_changes_nothing():
    weight, bias = healthy(), torch.zeros(120)
    weight[7] = 0.1 * weight[20]
    bias[7] = 5.0
    assert ids(ask(weight, bias=bias)) == []
    assert ids(ask(weight, pointwise=Softcap(5.0))) == [7]


@pytest.mark.parametrize(("V", "D"), [(120, 16), (20, 30), (300, 2)])
def test_capacity_is_positive_and_at_most_the_width_and_one(V, D):
    found = ask(healthy(V, D), samples=6)
    assert 1 <= found.capacity <= min(D + 1, V)
    assert found.capacity_interval[0] <= found.capacity <= found.capacity_interval[1]
    assert found.capacity_samples == 6


def test_a_wide_matrix_sets_every_token_at_will():
    found = ask(healthy(10, 30), samples=8)
    assert (found.capacity, ids(found)) == (10, [])


def test_the_capacity_of_a_circle_is_one():
    # Neighbours on a circle are the only free pairs, so half of the random pairs are not.
    angle = torch.arange(40) * 2 * torch.pi / 40
    assert ask(torch.stack([angle.cos(), angle.sin()], 1), samples=8).capacity == 1


@pytest.mark.parametrize("text", ["<script>alert(1)</script>", "\x00\x1b[31m", "\ud800", "", "\n"])
def test_hostile_text_is_left_unmodified(text):
    weight = healthy(40, 6)
    weight[7] = 0.1 * weight[20]
    assert ask(weight, name=lambda token: text).never[0].text == text


def test_without_time_tokens_are_undecided_and_none_is_guessed():
    # Deep Gaussians in few dimensions: most are inside, and each needs a program.
    weight = torch.randn(3000, 8, generator=torch.Generator().manual_seed(0))
    found = ask(weight, samples=8, seconds=0.02)
    assert found.undecided > 0
    assert found.seconds < 20
