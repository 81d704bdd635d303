"""States of a frozen body, with text drawn from a planted head: the truth that fits must find."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from fullrank.fit import splitting
from fullrank.fit.setting import Setting, prepare
from fullrank.fit.states import Part, Parts, split
from fullrank.heads import HEADS, Head, build

D, V = 6, 40
"""Of `split_rows_setting`."""


def planted_head(
    width: int, vocab: int, components: int, *, generator: torch.Generator | None = None, **options: Any
) -> Any:
    """A softmax, or a mixture whose second component negates the row of the first."""
    generator = torch.Generator().manual_seed(3) if generator is None else generator
    head: Any = build("mos", hidden=width, vocab=vocab, components=components, centred=False, **options)
    with torch.no_grad():
        head.decoder.weight.normal_(std=0.8, generator=generator)
        if components > 1:
            head.contexts.gate.weight.normal_(std=0.5, generator=generator)
            head.contexts.differences[0].weight[width : 2 * width] = -2.0 * torch.eye(width)
    return head


def softmax_over(weight: Tensor) -> Head:
    """A plain head with a copy of a matrix."""
    plain = build("softmax", hidden=weight.shape[1], vocab=len(weight))
    plain.decoder.weight = torch.nn.Parameter(weight.detach().clone())
    return plain


def student_of(plain: Head, name: str = "mos", **options: Any) -> Head:
    """A head over the matrix of a plain one, with the options that an upgrade takes."""
    if "centred" in HEADS[name].options():
        options["centred"] = False
    head = build(name, hidden=plain.hidden, vocab=plain.vocab, **options)
    head.decoder.weight = plain.decoder.weight
    if plain.softcap is not None:
        head.cap_scores(plain.softcap)
    return head


def draw_targets(log_probs: Tensor, generator: torch.Generator) -> Tensor:
    """[windows, time] a token for every distribution [windows, time, V]."""
    flat = torch.multinomial(log_probs.detach().flatten(0, 1).exp(), 1, generator=generator)
    return flat.view(log_probs.shape[:2])


def split_parts(targets: Tensor, *states: Tensor) -> Parts:
    """Validation and test parts beside the one to fit on; a block a window."""
    blocks = torch.arange(len(targets))[:, None].expand(targets.shape)
    return split(Part(states=states, targets=targets, ids=targets.roll(1, dims=1), blocks=blocks))


def setting_of(plain: Head, parts: Parts, **options: Any) -> Setting:
    """All rows of W on the exact loss."""
    defaults = {"rows": plain.vocab, "exact": True, "matrix": True, "limit": 1 << 24, "seed": 0}
    return prepare(plain, parts, **{**defaults, **options})


@functools.cache
def split_rows_setting(
    gap: float, *, softcap: float | None = None, windows: int = 120, time: int = 64
) -> Setting:
    """A model whose text comes from two softmaxes, their rows `gap` either side of the model's own row along
    a direction that turns with the state. A gap of 0: the model is right."""
    draw = torch.Generator().manual_seed(0)
    plain: Head = build("softmax", hidden=D, vocab=V)
    if softcap is not None:
        plain.cap_scores(softcap)
    hidden = torch.randn(windows, time, D, generator=draw)
    with torch.no_grad():
        plain.decoder.weight.normal_(generator=draw)
        sign = torch.randint(2, (windows, time, 1), generator=draw) * 2 - 1
        log_probs = plain(hidden + gap * sign * hidden.roll(1, dims=-1))
    return setting_of(plain, split_parts(draw_targets(log_probs, draw), hidden))


@functools.cache
def split_rows_gathered(gap: float, *, softcap: float | None = None) -> splitting.Gathered:
    return splitting.gather(split_rows_setting(gap, softcap=softcap), tokens=10_000)
