"""Measures of every head, streamed: one layer of some windows comes, sums over its queries stay.

Queries are taken at the end of context lengths L: the last few that see at most L positions. What is kept for
a layer is one number a window, head, length (and set size): enough for means over heads with intervals over
windows, for a picture by head, and for the tests of `attention_critical`.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fullrank.diagnose.attention.capture import Seen
from fullrank.models.normalisers import NORMALISERS, normalise
from fullrank.theory.attention import (
    Sets,
    difference_quotient,
    entropy,
    jacobian_norm,
    random_ranks,
    top_ranks,
)

LENGTHS = (32, 64, 128, 256, 512, 1024, 2048, 4096)
SIZES = (1, 2, 5, 10, 16, 20, 32, 50, 100, 200)
REFERENCE_SIZE = 16
"""From which on the published separable share is flat."""
TEMPERATURES = (0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0)
QUERIES = 2
"""Of a window at each length."""
STEP = 1e-3
"""Of the difference quotient: the paper does not say its own."""
SHIFTED = ("sink", "sigmoid")
"""Normalisers that see a constant added to the scores, so logarithms of weights will not do for them."""


Put = Callable[..., None]
"""(name, numbers [texts, heads, queries], or with sizes behind, place in the table's last dimension where the
numbers have none): keep their means over queries."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """Where to look."""

    lengths: tuple[int, ...]
    sizes: tuple[int, ...]
    reference: int
    """Set size of the figures a head; 0 where no set fits."""
    queries: int

    def rows(self) -> Tensor:
        """Positions of the queries, those of each length together."""
        return torch.cat([torch.arange(length - self.queries, length) for length in self.lengths])


def plan(window: int) -> Plan:
    """Lengths and sizes that fit into a window."""
    lengths = tuple(length for length in LENGTHS if length <= window)
    # A window between two of the lengths adds its own where it shows something new.
    if not lengths or window >= 1.25 * lengths[-1]:
        lengths = (*lengths, window)
    queries = min(QUERIES, lengths[0] // 2)
    sizes = tuple(size for size in SIZES if size <= lengths[-1] - queries)
    reference = max((size for size in sizes if 1 < size <= REFERENCE_SIZE), default=0)
    return Plan(lengths=lengths, sizes=sizes, reference=reference, queries=queries)


class Tally:
    """Figures of all layers: `tables[name][layer]` is [windows, heads, lengths, ...], NaN where none."""

    def __init__(self, plan: Plan, windows: int, *, seed: int, memory: int, what_if: Sequence[str]) -> None:
        self.plan, self.windows, self.memory, self.what_if = plan, windows, memory, tuple(what_if)
        self.generator = torch.Generator().manual_seed(seed)
        self.tables: dict[str, dict[int, Tensor]] = defaultdict(dict)
        self.exceeded = torch.zeros(len(plan.lengths), len(plan.sizes), dtype=torch.long)
        self.difference = 0.0
        self.recomputed = True
        self.key_heads: dict[int, int] = {}
        self.values_known = True

    @torch.no_grad()
    def take(self, seen: Seen, windows: slice) -> None:
        # In this order NaN, where nothing could be recomputed, stays.
        self.difference = max(seen.difference, self.difference)
        self.recomputed &= seen.reach is not None
        self.values_known &= seen.values is not None
        self.key_heads[seen.layer] = seen.key_heads
        texts, heads, _, length = seen.weights.shape
        width = 0 if seen.values is None else seen.values.shape[-1]
        # fp64 copies and a few buffers, of all set sizes at once; and of one text, all pairs of values.
        each = 8 * texts * length * (8 * self.plan.queries * (1 + len(self.plan.sizes)) + 2 * width)
        group = max(1, self.memory // (each + 8 * 3 * length**2))
        for start in range(0, heads, group):
            self._heads(seen, windows, slice(start, start + group), heads)

    def _heads(self, seen: Seen, windows: slice, part: slice, heads: int) -> None:
        for place, length in enumerate(self.plan.lengths):
            rows = slice(place * self.plan.queries, (place + 1) * self.plan.queries)

            def cut(table: Tensor, rows: slice = rows, length: int = length) -> Tensor:
                return _host(table[:, part, rows, :length])

            weights, visible = cut(seen.weights), cut(seen.visible)
            scores = cut(seen.scores).double()
            values = None if seen.values is None else _host(seen.values[:, part, :length]).double()

            def put(
                name: str,
                value: Tensor,
                number: int | None = None,
                *,
                place: int = place,
                layer: int = seen.layer,
            ) -> None:
                cells = self._table(name, layer, heads)[windows, part, place][: len(value)]
                means = value.double().mean(2)
                if number is not None:
                    cells[..., number] = means.cpu()
                else:
                    cells[..., : means.shape[-1]] = means.cpu()

            self._basic(
                put, weights, scores, visible, None if seen.reach is None else seen.reach[:, part, rows]
            )
            last = place == len(self.plan.lengths) - 1
            if values is not None:
                self._sets(put, weights, values, visible, place, windows.start == 0)
            if last:
                self._temperatures(put, scores, visible)
                self._what_if(put, scores, values, visible, seen.reach is not None)

    def _table(self, name: str, layer: int, heads: int) -> Tensor:
        tables = self.tables[name]
        if layer not in tables:
            more = {"set": len(self.plan.sizes), "temperature": len(TEMPERATURES), "if": len(self.what_if)}
            shape = [self.windows, heads, len(self.plan.lengths)]
            kind = name.split(" ")[0]
            tables[layer] = torch.full([*shape, *([more[kind]] if kind in more else [])], torch.nan).double()
        return tables[layer]

    @staticmethod
    def _basic(put: Put, weights: Tensor, scores: Tensor, visible: Tensor, reach: Tensor | None) -> None:
        count = visible.sum(-1).double()
        spread = entropy(weights)
        largest = weights.double().amax(-1)
        bottom = scores.masked_fill(~visible, torch.inf).amin(-1)
        put("visible", count)
        put("entropy", spread)
        put("effective_tokens", spread.exp())
        put("first_mass", weights[..., 0])
        put("largest", largest)
        put("log_largest", (count * largest).log())
        # From the scores: the smallest weights of a sharp head are 0 in fp32.
        put("log_smallest", count.log() + bottom - scores.logsumexp(-1))
        # Of the last query: its neighbours say the same, and this is the dearest of these measures.
        put("sensitivity", jacobian_norm(_at_most_one(weights[..., -1:, :])))
        if reach is not None:
            exponent = 2 * _host(reach).double()
            put("score_range", scores.amax(-1) - bottom)
            put("exponent", exponent)
            put("envelope_says", (exponent < count.log()).double())

    def _sets(
        self, put: Put, weights: Tensor, values: Tensor, visible: Tensor, place: int, first: bool
    ) -> None:
        room = int(visible.sum(-1).min())
        sizes = [size for size in self.plan.sizes if size < room]
        if not sizes:
            return
        sets = Sets(weights, values, visible)
        ranks = {"top": top_ranks(weights, visible), "random": random_ranks(visible, self.generator)}
        for kind, order in ranks.items():
            found = sets.separation(order, sizes)
            for name in ("precision", "recall", "f", "mass", "distance"):
                put(f"set {name} {kind}", getattr(found, name))
            if first:
                # The bound looks at all pairs of values: the last query of the first window has to do.
                distance = found.distance[:1, :, -1:]
                final = Sets(weights[:1, :, -1:], values[:1], visible[:1, :, -1:])
                bound = final.bound(order[:1, :, -1:], sizes)
                put(f"set last_distance {kind}", distance)
                put(f"set bound {kind}", bound)
                over = distance > bound * (1 + 1e-7) + 1e-12
                self.exceeded[place, : len(sizes)] += over.sum((0, 1, 2)).cpu()

    def _temperatures(self, put: Put, scores: Tensor, visible: Tensor) -> None:
        # One query a window: each temperature costs as much as all measures of a length.
        scores, visible = scores[..., -1:, :], visible[..., -1:, :]
        draws = torch.randn(scores.shape, generator=self.generator, dtype=torch.float64).to(scores.device)
        draws = draws.masked_fill(~visible, 0.0)
        directions = draws / draws.norm(dim=-1, keepdim=True)
        for number, temperature in enumerate(TEMPERATURES):
            exact = jacobian_norm(torch.softmax(scores / temperature, -1), temperature)
            put("temperature exact", exact, number)
            put("temperature above", (exact > 0.25 / temperature).double(), number)
            put(
                "temperature estimated",
                difference_quotient(scores, directions, temperature=temperature, step=STEP),
                number,
            )

    def _what_if(
        self, put: Put, scores: Tensor, values: Tensor | None, visible: Tensor, recomputed: bool
    ) -> None:
        size = self.plan.reference
        room = int(visible.sum(-1).min())
        for number, name in enumerate(self.what_if):
            if name in SHIFTED and not recomputed:
                continue
            weights = normalise(scores, mask=visible, name=NORMALISERS[name].name)
            put("if effective_tokens", entropy(weights).exp(), number)
            put("if first_mass", weights[..., 0], number)
            zeros = ((weights == 0) & visible).sum(-1) / visible.sum(-1)
            put("if zeros", zeros, number)
            put("if total", weights.sum(-1), number)
            if values is not None and 0 < size < room:
                sets = Sets(weights, values, visible)
                top, other = top_ranks(weights, visible), random_ranks(visible, self.generator)
                put("if separable", sets.separation(top, [size]).recall[..., 0], number)
                put("if separable_random", sets.separation(other, [size]).recall[..., 0], number)

    def stacked(self, name: str) -> Tensor | None:
        """All heads of all layers [windows, heads, ...], in order; None where it was never measured."""
        tables = self.tables.get(name)
        return None if not tables else torch.cat([tables[layer] for layer in sorted(tables)], dim=1)


def _host(table: Tensor) -> Tensor:
    """On a device that has fp64."""
    return table.cpu() if table.device.type == "mps" else table


def _at_most_one(weights: Tensor) -> Tensor:
    """fp32 weights that sum to a little more than 1 by rounding, as shares."""
    wide = weights.double()
    return wide / wide.sum(-1, keepdim=True).clamp(min=1.0)
