"""Direct output connection, Takase et al. 2018: mos whose contexts come from several layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fullrank.heads import build

NAMES = ["doc", "doc-as-published"]


@pytest.mark.parametrize("name", NAMES)
def test_the_equation(cases: dict[str, Any], component: Any, name: str) -> None:
    """p = sum_k prior_k softmax of the contexts' scores."""
    head = cases[name].build().double()
    inputs = cases[name].inputs(head, (1,), dtype=torch.float64)
    contexts, log_prior = head.contexts(inputs.each)
    prior = log_prior[0].exp()
    parts = [component(head, contexts[0, k]) for k in range(3)]
    expected = sum(prior[k] * part for k, part in enumerate(parts))
    torch.testing.assert_close(head(inputs.states)[0].exp(), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_its_rank_is_not_bounded_by_the_width(
    cases: dict[str, Any], rank_of: Any, name: str, biased: bool
) -> None:
    """Above even K (D + 1), which a sum of logits of K components could reach."""
    assert rank_of(cases[name], bias=biased) > 3 * (4 + 1)


@pytest.mark.parametrize("options", [{"centred": False}, {"as_published": True}], ids=["free", "published"])
def test_it_reads_each_layer_for_its_own_components(cases: dict[str, Any], options: dict[str, bool]) -> None:
    head = cases["doc"].build(**options)
    last, older = torch.randn(5, 6), torch.randn(5, 5)
    contexts, log_prior = head.contexts([last, older])
    moved, moved_prior = head.contexts([last, older + 1.0])
    torch.testing.assert_close(moved[:, :2], contexts[:, :2], rtol=0, atol=0)
    torch.testing.assert_close(moved_prior, log_prior, rtol=0, atol=0)
    assert (moved[:, 2] - contexts[:, 2]).abs().max() > 0.1


def test_the_size_of_other_layers_does_not_count(cases: dict[str, Any]) -> None:
    """A transformer normalises its last states alone, and the others grow while it is trained."""
    head = cases["doc"].build().double()
    last, older = torch.randn(5, 6).double(), torch.randn(5, 5).double()
    contexts, _ = head.contexts([last, older])
    larger, _ = head.contexts([last, 100.0 * older])
    torch.testing.assert_close(larger, contexts, rtol=1e-3, atol=1e-4)
    turned, _ = head.contexts([last, -older])
    assert (turned - contexts).abs().max() > 0.1
    zeros, _ = head.contexts([last, torch.zeros_like(older)])
    assert bool(zeros.isfinite().all())


def test_it_may_read_a_layer_for_the_prior_alone(cases: dict[str, Any]) -> None:
    head = cases["doc"].build(layers=((6, 0), (5, 2)))
    inputs = cases["doc"].inputs(head)
    log_probs = head(inputs.states)
    assert head.components == 2
    assert (torch.logsumexp(log_probs, -1).abs() < 1e-5).all()


def test_published_parameter_count_on_penn_treebank() -> None:
    """22.85M are 1.35M more than the 21.50M of mos, with the same body."""

    def own(name: str, **options: Any) -> int:
        with torch.device("meta"):
            head = build(name, vocab=10_000, width=280, hidden=620, as_published=True, **options)
        return sum(parameter.numel() for _, parameter in head.own_parameters())

    more = own("doc", layers=((620, 15), (960, 5))) - own("mos", components=15)
    assert round(more / 1e6, 2) == 1.35
