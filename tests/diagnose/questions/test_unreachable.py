"""Unreachable tokens: planted inside the hull, twice in the matrix, or among the padding."""

import pytest
import torch

from fullrank.diagnose.questions.unreachable import unreachable
from fullrank.models.output_layer import OutputLayer
from fullrank.ops import Softcap


def gaussian(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def healthy(V=120, D=16):
    """Gaussian rows of one length: every one a vertex of the sphere's hull."""
    weight = gaussian(V, D)
    return weight / weight.norm(dim=1, keepdim=True)


def names(token):
    return f"token {token}"


def test_a_healthy_matrix_has_none():
    found = unreachable(OutputLayer(weight=healthy(), tokens=120), names, samples=2)
    assert found.never == ()
    assert (found.argmaxable, found.undecided, found.duplicates, found.padding_never) == (120, 0, 0, 0)
    assert found.vocabulary == 120
    assert found.seconds > 0


def test_a_planted_inner_token_is_found_and_named():
    weight = healthy()
    weight[7] = weight[60:90].mean(dim=0)
    weight[55] = 0.02 * weight[5]
    found = unreachable(OutputLayer(weight=weight, tokens=120), names, samples=2)
    assert [(one.id, one.text) for one in found.never] == [(7, "token 7"), (55, "token 55")]
    assert all(0 < one.depth <= 1 for one in found.never)
    # Next to the origin is deeper than at the centre of a quarter of the rows.
    assert found.never[1].depth > found.never[0].depth
    assert (found.argmaxable, found.duplicates, found.undecided) == (118, 0, 0)


def test_the_mean_row_is_as_deep_as_can_be():
    weight = healthy()
    weight[0] = weight[1:].mean(dim=0)
    (only,) = unreachable(OutputLayer(weight=weight, tokens=120), names, samples=2).never
    assert only.id == 0
    assert only.depth == pytest.approx(1, abs=1e-3)


def test_duplicates_are_counted_apart():
    weight = healthy()
    weight[3] = weight[90]
    weight[8] = 0.2 * weight[5]
    found = unreachable(OutputLayer(weight=weight, tokens=120), names, samples=2)
    assert [one.id for one in found.never] == [3, 8, 90]
    assert found.duplicates == 2
    # A higher bias breaks the tie for one of them.
    bias = torch.zeros(120)
    bias[3] = 1.0
    found = unreachable(OutputLayer(weight=weight, bias=bias, tokens=120), names, samples=2)
    assert 90 in [one.id for one in found.never]
    assert 3 not in [one.id for one in found.never]
    assert found.duplicates == 1


def test_padding_is_no_loss_to_anyone():
    weight = torch.cat([healthy(), torch.zeros(10, 16)])
    weight[7] = 0.1 * weight[20]
    found = unreachable(OutputLayer(weight=weight, tokens=120), names, samples=2)
    assert found.vocabulary == 120
    assert [one.id for one in found.never] == [7]
    assert found.padding_never == 10
    assert found.duplicates == 0
    assert found.argmaxable == 119


def test_a_bias_can_lift_an_inner_token_out():
    weight = healthy()
    weight[7] = 0.1 * weight[20]
    bias = torch.zeros(120)
    bias[7] = 5.0
    assert unreachable(OutputLayer(weight=weight, bias=bias, tokens=120), names, samples=2).never == ()


def test_a_soft_cap_changes_nothing():
    weight = healthy()
    weight[7] = 0.1 * weight[20]
    found = unreachable(OutputLayer(weight=weight, pointwise=Softcap(5.0), tokens=120), names, samples=2)
    assert [one.id for one in found.never] == [7]


def test_capacity_is_positive_and_at_most_the_width_and_one():
    for V, D in ((120, 16), (20, 30), (300, 2)):
        found = unreachable(OutputLayer(weight=healthy(V, D), tokens=V), names, samples=6)
        assert 1 <= found.capacity <= min(D + 1, V)
        assert found.capacity_interval[0] <= found.capacity <= found.capacity_interval[1]
        assert found.capacity_samples == 6


def test_a_wide_matrix_sets_every_token_at_will():
    found = unreachable(OutputLayer(weight=healthy(10, 30), tokens=10), names)
    assert found.capacity == 10
    assert found.never == ()


def test_a_plane_has_capacity_two_at_most_three():
    # Neighbours on a circle are the only free pairs, so half of the random pairs are not.
    angle = torch.arange(40) * 2 * torch.pi / 40
    found = unreachable(OutputLayer(weight=torch.stack([angle.cos(), angle.sin()], 1), tokens=40), names)
    assert found.capacity == 1


@pytest.mark.parametrize(
    "text", ["<script>alert(1)</script>", "\x00\x1b[31m", "\ud800", "", "\n", "' OR 1=1"]
)
def test_hostile_text_passes_through_as_it_is(text):
    weight = healthy(40, 6)
    weight[7] = 0.1 * weight[20]
    found = unreachable(OutputLayer(weight=weight, tokens=40), lambda token: text, samples=2)
    assert found.never[0].text == text


def test_only_tokens_that_are_listed_are_named():
    asked = []

    def name(token):
        asked.append(token)
        return "x"

    weight = torch.cat([healthy(), torch.zeros(10, 16)])
    weight[7] = 0.1 * weight[20]
    unreachable(OutputLayer(weight=weight, tokens=120), name, samples=2)
    assert asked == [7]


def test_without_time_tokens_are_undecided_and_none_is_guessed():
    # Deep Gaussians in few dimensions: most are inside, and each needs a program.
    weight = gaussian(3000, 8)
    found = unreachable(OutputLayer(weight=weight, tokens=3000), names, seconds=0.02)
    assert found.undecided > 0
    assert found.argmaxable + len(found.never) + found.undecided == 3000
    assert found.seconds < 20


def test_progress_rises_to_the_end():
    seen = []
    output = OutputLayer(weight=healthy(), tokens=120)
    unreachable(output, names, samples=2, progress=lambda label, share: seen.append((label, share)))
    shares = [share for _, share in seen]
    assert all(0 <= share <= 1 for share in shares)
    assert seen[-1][0] == "capacity"
