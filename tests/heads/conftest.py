"""The table of heads that the contract is tested on, and what a test needs to run any of them.

A test that takes `case` runs once for every row of the table; one that takes `mixture` runs for the mixtures
in our parametrisation. The parameter counts are written out from the papers, not read off the modules.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from fullrank.heads import Head, build

H, V, D, K = 6, 11, 4, 3
"""Sizes of the table's heads: small, and no two alike, so that a swapped pair of axes shows."""
OLDER = 5
"""Width of the second layer that DOC reads."""
BINS = 40
LEADING = (2, 3)
"""Batch and time."""


@dataclass(frozen=True)
class Inputs:
    """Arguments of forward besides the targets."""

    states: Tensor | list[Tensor]
    context: dict[str, Tensor]
    targets: Tensor

    @property
    def each(self) -> list[Tensor]:
        return [self.states] if isinstance(self.states, Tensor) else self.states

    def repeated(self, times: int) -> Inputs:
        """The same sequences many times over, one copy a batch entry."""
        each = [state.repeat_interleave(times, 0) for state in self.each]
        return Inputs(
            each[0] if isinstance(self.states, Tensor) else each,
            {name: ids.repeat_interleave(times, 0) for name, ids in self.context.items()},
            self.targets.repeat_interleave(times, 0),
        )


@dataclass(frozen=True)
class Case:
    """One head with its options, and the paper's count of its parameters as a function of H, V and D."""

    id: str
    name: str
    count: Callable[[int, int, int], int]
    options: dict[str, Any] = field(default_factory=dict)
    any_leading_shape: bool = True
    """False where the head reads along time and so needs [batch, time, H]."""
    smooth: dict[str, Any] = field(default_factory=dict)
    """Options without which rounding may change a choice, and the distribution by a step."""

    @property
    def mixed_by_the_primitive(self) -> bool:
        """Whether several rows a token are mixed in `ops.mixture_nll`, or are a cache's base."""
        return self.name in ("mos", "moss", "trunk", "doc") or "base" in self.options

    def build(self, *, vocab: int = V, seed: int = 0, warm: bool = True, **changed: Any) -> Head:
        """The head; `warm` moves every parameter off its start, where mixtures have equal components."""
        torch.manual_seed(seed)
        options = {"hidden": H, "width": D, **self.options, **changed}
        head = build(self.name, vocab=vocab, **options)
        if warm:
            with torch.no_grad():
                for parameter in head.parameters():
                    parameter.add_(torch.randn_like(parameter), alpha=0.7)
        return head

    def inputs(
        self,
        head: Head,
        leading: tuple[int, ...] = LEADING,
        *,
        seed: int = 1,
        dtype: torch.dtype = torch.float32,
        gradient: bool = False,
    ) -> Inputs:
        generator = torch.Generator().manual_seed(seed)
        each = [
            torch.randn(*leading, width, generator=generator).to(dtype).requires_grad_(gradient)
            for width in head.state_widths
        ]
        # Few distinct ids, so that a head that points at earlier tokens meets repetitions.
        ids = torch.randint(0, min(4, head.vocab), leading, generator=generator)
        targets = torch.randint(0, head.vocab, leading, generator=generator)
        return Inputs(
            each[0] if len(each) == 1 else each, {"context": ids} if head.needs_context else {}, targets
        )


def softmax_count(H: int, V: int, D: int) -> int:
    return V * D + (H * D if H != D else 0)


def mixture_count(H: int, V: int, D: int) -> int:
    """Yang et al. 2018: W, K projections with bias, and the prior's matrix without one."""
    return V * D + K * H * D + K * D + K * H


def our_mixture_count(H: int, V: int, D: int) -> int:
    return mixture_count(H, V, D) + (H * D if H != D else 0)


PRIVATE = 2
LAYERS = ((H, 2), (OLDER, 1))


def trunk_count(H: int, V: int, D: int) -> int:
    return V * D + H * (D - PRIVATE) + K * (H * PRIVATE + PRIVATE) + K * H


def our_trunk_count(H: int, V: int, D: int) -> int:
    return V * D + H * D + K * (H * PRIVATE + PRIVATE) + K * H


def doc_count(H: int, V: int, D: int) -> int:
    """Takase et al. 2018: a projection a component, each from its own layer; the prior reads the last one."""
    return V * D + 2 * (H * D + D) + 1 * (OLDER * D + D) + 3 * H


SQUARE = {"hidden": D, "width": D, "bias": True}
MIXTURE = {"components": K}
PUBLISHED = {"components": K, "as_published": True}

TABLE = [
    Case("softmax", "softmax", softmax_count),
    Case("softmax-square-with-bias", "softmax", lambda H, V, D: V * D + V, SQUARE),
    Case("low-rank", "low_rank", lambda H, V, D: V * D + H * 2 + 2 * D, {"rank": 2}),
    Case("sigsoftmax", "sigsoftmax", softmax_count),
    Case("sigsoftmax-with-bias", "sigsoftmax", lambda H, V, D: V * D + V + H * D, {"bias": True}),
    Case(
        "plif",
        "plif",
        lambda H, V, D: softmax_count(H, V, D) + BINS,
        {"bins": BINS, "limit": 3.0, "spread": 1.0},
    ),
    Case("moc", "moc", our_mixture_count, MIXTURE),
    Case("moc-as-published", "moc", mixture_count, PUBLISHED),
    Case("mos", "mos", our_mixture_count, MIXTURE),
    Case("mos-as-published", "mos", mixture_count, PUBLISHED),
    Case(
        "mos-square-with-bias",
        "mos",
        lambda H, V, D: V * D + V + K * D * D + K * D + K * D,
        MIXTURE | SQUARE,
    ),
    Case("moss", "moss", our_mixture_count, MIXTURE),
    Case("moss-as-published", "moss", mixture_count, PUBLISHED),
    Case("trunk", "trunk", our_trunk_count, MIXTURE | {"private": PRIVATE}),
    Case("trunk-as-published", "trunk", trunk_count, PUBLISHED | {"private": PRIVATE}),
    Case("doc", "doc", lambda H, V, D: doc_count(H, V, D) + H * D, {"layers": LAYERS}),
    Case("doc-as-published", "doc", doc_count, {"layers": LAYERS, "as_published": True}),
]
# Softmax-CPR counts one H x D map for each of: the base, the context part, two for the pointer, a reranker.
TABLE += [
    Case(
        "mixtape",
        "mixtape",
        lambda H, V, D: V * D + 4 * H * D + 3 * (2 * H + H + V) + V * 2,
        {"components": 4, "gate_width": 2},
    ),
    Case(
        "mixtape-shared-gates",
        "mixtape",
        lambda H, V, D: V * D + V + 2 * H * D + 1 * (2 * H + H + 3) + 3 * 2 + 1,
        {"components": 2, "gate_width": 2, "frequent": (1, 4, 3), "bias": True},
    ),
    Case(
        "facets",
        "facets",
        lambda H, V, D: V * D + 2 * 3 * H * H + H + (4 + 3 - 1) * 2 * H * D + 3 * (2 * H + 1),
        {"layers": 2, "positions": 3, "partitions": 4, "softmaxes": 3},
        any_leading_shape=False,
    ),
    Case(
        "pointer",
        "pointer",
        lambda H, V, D: V * D + H * D * (1 + 1 + 2 + 2),
        {"rerank": (5, 2)},
        any_leading_shape=False,
        smooth={"rerank": ()},
    ),
    Case("cache", "cache", lambda H, V, D: softmax_count(H, V, D) + 1, any_leading_shape=False),
    Case(
        "cache-over-mos-with-maps",
        "cache",
        lambda H, V, D: our_mixture_count(H, V, D) + 1 + 2 * (H * H + H),
        {"base": "mos", "base_options": MIXTURE, "maps": True},
        any_leading_shape=False,
    ),
]
CASES = {case.id: case for case in TABLE}
MIXTURES = ("moc", "mos", "moss", "trunk", "doc")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames:
        metafunc.parametrize("case", CASES.values(), ids=CASES.keys())
    if "mixture" in metafunc.fixturenames:
        metafunc.parametrize("mixture", [CASES[name] for name in MIXTURES], ids=MIXTURES)


@pytest.fixture
def cases() -> dict[str, Case]:
    return CASES


@pytest.fixture(autouse=True)
def _fixed_seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def component() -> Callable[..., Tensor]:
    """The distribution [V] of one context [D] through a head's W, from exponentials."""

    def one(head: Head, context: Tensor, *, sigmoid: bool = False) -> Tensor:
        scores = head.decoder.weight @ context
        if head.decoder.bias is not None:
            scores = scores + head.decoder.bias
        mass = scores.exp() * torch.sigmoid(scores) if sigmoid else scores.exp()
        return mass / mass.sum()

    return one


@pytest.fixture
def rank_of() -> Callable[..., int]:
    """Rank of a head's log-probabilities, 60 states by 40 tokens, less what shifts of rows may choose."""

    def rank(case: Case, **options: Any) -> int:
        head = case.build(vocab=40, **options).double()
        log_probs = head(case.inputs(head, (60,), dtype=torch.float64).states).detach()
        values = torch.linalg.svdvals(log_probs - log_probs.mean(-1, keepdim=True))
        return int((values > values[0] * max(log_probs.shape) * torch.finfo(torch.float64).eps).sum())

    return rank
