"""Whole heads on hidden states: softmax, mixture of softmaxes and shared trunk, beside the compiled softmax.

A head call includes the projections that make its rows. Its products are those of all its rows with W; the
trunk's K rows share all but r entries, and its products are those of N rows of width D - r and of N K rows of
width r. `time_over_softmax` is over the
fastest softmax of the same rounds. The trunk runs whatever path its head takes; `path` says which.

The differences between components are drawn at random: as a head starts, all its rows would be equal.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.exact import Gradients, exact_gradients
from benchmarks.gpu_layer import Ready, Row, bare_products, measure_together, prepare
from benchmarks.gpu_settings import Settings
from benchmarks.measure import Step
from benchmarks.peers import LayerInputs, Loss, compiled_by, compiled_softmax, draw_inputs
from fullrank.heads import Head, RowHead, build


def draw_head(name: str, *, hidden: int, vocab: int, settings: Settings, seed: int = 0, **more: Any) -> Head:
    """A head whose scores have spread 1 on states of spread 1 and whose components differ."""
    torch.manual_seed(settings.seed + seed)
    # On the device from the start: a processor would take seconds for a large W.
    with torch.device(settings.device):
        head = build(name, hidden=hidden, vocab=vocab, **more)
        nn.init.normal_(head.decoder.weight, std=hidden**-0.5)
        spread_components(head)
    return head.to(settings.dtype)


def spread_components(head: Head) -> None:
    """Components that differ; as a head starts they are equal."""
    contexts = getattr(head, "contexts", None)
    for difference in () if contexts is None else contexts.differences:
        nn.init.normal_(difference.weight, std=(2 * head.hidden) ** -0.5)


def path_of(head: Head) -> str:
    """Whether a head computes its loss in a way of its own or through K full rows a token."""
    return "rows" if type(head)._loss is RowHead._loss else "own"


@dataclass(frozen=True, kw_only=True)
class HeadInputs(LayerInputs):
    """Hidden states [N, 1, H] in the place of rows, and the head's parameters beside W."""

    others: tuple[Tensor, ...]

    @property
    def leaves(self) -> list[Tensor]:
        return [*super().leaves, *self.others]


def head_inputs(head: Head, hidden: Tensor, targets: Tensor) -> HeadInputs:
    weight = head.decoder.weight
    return HeadInputs(
        rows=hidden,
        log_prior=hidden.new_zeros(hidden.shape[0], 1),
        weight=weight,
        targets=targets,
        others=tuple(each for each in head.parameters() if each is not weight),
    )


def exact_head_gradients(head: Head, hidden: Tensor, targets: Tensor) -> Gradients:
    """fp64 gradients in the hidden states and in W, the head's own projections in fp64 as well."""
    assert isinstance(head, RowHead)
    wide = copy.deepcopy(head).double()
    states = hidden.detach()[:, 0].double().requires_grad_()
    rows, log_prior = wide._flat_rows([states])
    found = exact_gradients(rows, log_prior, wide.decoder.weight, targets)
    if rows.shape[1] == 1:
        torch.autograd.backward([rows], [found.rows])
    else:
        torch.autograd.backward([rows, log_prior], [found.rows, found.log_prior])
    assert states.grad is not None
    return Gradients(states.grad[:, None], found.log_prior, found.weight, found.share)


def loss_of(head: Head, hidden: Tensor, targets: Tensor) -> Loss:
    def loss() -> Tensor:
        value = head(hidden[:, 0], targets)
        assert isinstance(value, Tensor)
        return value

    return loss


def both(first: dict[str, Step], second: dict[str, Step]) -> dict[str, Step]:
    """One after the other, for every pair of cuts."""

    def run(one: Step, other: Step) -> None:
        one()
        other()

    return {
        f"{name}; {other}": partial(run, step, more)
        for name, step in first.items()
        for other, more in second.items()
    }


def measure_heads(settings: Settings, D: int, V: int, K: int) -> list[Row]:
    N, r = settings.tokens, settings.private(D)
    draw = torch.Generator(settings.device).manual_seed(settings.seed)
    hidden = torch.randn(N, 1, D, generator=draw, device=settings.device).to(settings.dtype).requires_grad_()
    targets = torch.randint(V, (N,), generator=draw, device=settings.device)
    base = {"width": D, "vocab": V, "tokens": N, "part": "heads"}
    variants: tuple[tuple[str, dict[str, int]], ...] = (
        ("softmax", {}),
        ("mos", {"components": K}),
        ("trunk", {"components": K, "private": r}),
    )

    def several(components: int, width: int) -> LayerInputs:
        return draw_inputs(
            N=N, K=components, D=width, V=V, dtype=settings.dtype, device=settings.device, seed=0
        )

    shared, own = bare_products(several(1, D - r)), bare_products(several(K, r))
    products = [bare_products(several(1, D)), bare_products(several(K, D)), both(shared, own)]
    rows: list[Row] = []
    ready: list[Ready | str] = []
    for name, options in variants:
        head = draw_head(name, hidden=D, vocab=V, settings=settings, **options)
        inputs = head_inputs(head, hidden, targets)
        exact = exact_head_gradients(head, hidden, targets)
        ready.append(prepare(partial(loss_of, head, hidden, targets), inputs, exact, settings))
        del exact
        more = {"components": 1, **options, "path": path_of(head)}
        rows.append({"implementation": "fullrank", "head": name, **base, **more})
        if name == "softmax":
            plain = inputs

    def make_compiled() -> Loss:
        compiled = compiled_by(settings.compiler, compiled_softmax)
        return lambda: compiled(hidden[:, 0], plain.weight, targets)

    ready.append(prepare(make_compiled, plain, None, settings))
    rows.append({"implementation": "compiled", "head": "softmax", "components": 1, **base})
    measure_together(rows, ready, [*products, products[0]], settings)
    fastest = min(
        (row["milliseconds"] for row in rows if row["head"] == "softmax" and "missing" not in row),
        default=None,
    )
    for row in rows:
        if fastest is not None and "missing" not in row:
            row["time_over_softmax"] = row["milliseconds"] / fastest
    return rows
