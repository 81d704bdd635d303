"""Question 6: what would a better head buy?

    split     without training: does splitting the rows of the refitted output layer help, and along how many
              directions (`fit.splitting`)? That says how many components mixtures are given
    fits      heads and their controls, all from the refitted layer, until their curves are flat
              (`fit.comparison`)
    power     a gain planted in the same states, and what the same fits make of it (`fit.power`)

A gain is the loss of the best control minus the head's, token by token on held-out text, so that text which
is hard for both cancels. It says what a head buys this body, frozen; not what a body trained with that head
from the start would reach.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import cast

import torch
from torch import nn

from fullrank.errors import FullrankError
from fullrank.fit import comparison, estimates, power
from fullrank.fit.controls import CONTROLS
from fullrank.fit.setting import layer_of, plain_rows
from fullrank.fit.states import Parts
from fullrank.heads import HEADS, Head, Start, build
from fullrank.heads.base import without_matrix
from fullrank.heads.mixture import MixtureHead
from fullrank.results.diagnosis import BetterHead, CurvePoint, Estimate, HeadFit, Power, SplitTest

MOST_COMPONENTS = 4
"""Of a mixture, where their number is not given."""
LEAST_PLANTED, LEAST_PLANTED_ONCE = 0.01, 0.05
"""Nats per token below which no gain is planted; and where one try must do."""
PLANTED = 4
"""Times the gain below which splitting finds nothing on so many tokens: what is planted at the least, for
each direction. Of four times that a narrow model's fits find most and a wide one's nothing, of sixteen times
half; so where one try must do it is `MORE` times as much."""
TRIES, MORE = 2, 4
"""How often a gain is planted where the first was not found, once where a pass over the vocabulary is dear or
the model is wide; and how many times as large the second is."""


def better_head(
    plain: Head,
    parts: Parts,
    *,
    heads: Sequence[str],
    components: int | None = None,
    measure_power: bool = True,
    settings: comparison.Settings,
    progress: Callable[[str, float], None] = lambda label, share: None,
) -> BetterHead:
    """Fit the controls and the heads. `components` of a mixture are chosen by the split where not given."""
    known = comparison.candidates()
    unknown = [head for head in heads if head not in known]
    if unknown or not heads or (components is not None and components < 2):
        raise FullrankError(
            f"heads {', '.join(heads)} with {components} components: expected some of {', '.join(known)}, "
            "and 2 or more components"
        )

    def make(sure: int) -> Mapping[str, Head]:
        number = components or components_for(sure)
        return {name: starting_as(plain, name, parts, number) for name in heads}

    setting = comparison.setting_for(list(make(0).values()), plain, parts, settings)
    share = 0.7 if measure_power else 1.0
    found = comparison.compare(
        setting, make, settings=settings, progress=lambda label, part: progress(label, share * part)
    )
    best, gain = found.best, found.gain(found.best)
    measured: Power | None = None
    if measure_power:
        measured = _power(
            found, gain, settings, lambda label, part: progress(label, share + part * (1 - share))
        )
    held_out = parts.held_out
    return BetterHead(
        original=estimates.mean(found.original, found.blocks),
        fits=tuple(_fit(found, name) for name in found.fits),
        best=best,
        best_gain=gain,
        seeds=settings.seeds,
        fit_tokens=len(parts.fit),
        held_out_tokens=len(held_out),
        trained_rows=found.setting.rows,
        control=found.control,
        refit_gain=None
        if found.refit is None
        else estimates.mean(found.original - found.refit.losses, found.blocks),
        split=_split(found),
        power=measured,
    )


def components_for(sure: int) -> int:
    """Components that have room for so many directions: a power of two."""
    return max(2, min(MOST_COMPONENTS, 2 ** math.ceil(math.log2(sure + 1))))


def starting_as(plain: Head, name: str, parts: Parts, components: int) -> Head:
    """A head that starts as the plain one."""
    layer, rows = layer_of(plain), plain_rows(plain, parts.fit)
    some = rows[:: max(1, len(rows) // 256)]
    scores = some @ layer.weight.T
    if layer.bias is not None:
        scores += layer.bias
    start = Start(
        weight=cast(nn.Parameter, plain.decoder.weight),
        bias=plain.decoder.bias,
        softcap=plain.softcap,
        size=float(rows.double().square().mean().sqrt()),
        low=float(scores.min()),
        high=float(scores.max()),
        widths=(plain.width,),
    )
    kind = HEADS[name]
    options = {"components": components} if "components" in kind.options() else {}
    with without_matrix(), torch.random.fork_rng(devices=[]):
        head = build(name, hidden=plain.width, vocab=plain.vocab, **kind.start_options(start, options))
    head.start_from(start)
    return head


def _power(
    found: comparison.Comparison,
    gain: Estimate,
    settings: comparison.Settings,
    progress: Callable[[str, float], None],
) -> Power | None:
    """Plant what was found, or about what should just be seen, and more where that is not found; None where
    no mixture was fitted that could find it."""
    name = next((name for name, head in found.heads.items() if isinstance(head, MixtureHead)), None)
    if name is None or found.directions is None:
        return None
    head = found.heads[name]
    assert isinstance(head, MixtureHead)
    fresh = starting_as(found.setting.plain, name, found.setting.parts, head.components)
    assert isinstance(fresh, MixtureHead)
    error = (gain.high - gain.low) / 4
    narrow = found.directions.covered >= power.COVERED
    tries = TRIES if found.setting.sampled is None and narrow else 1
    least, times = (LEAST_PLANTED, PLANTED) if tries > 1 else (LEAST_PLANTED_ONCE, PLANTED * MORE)
    noise = (head.components - 1) * found.directions.least
    level = max(least, gain.value, 2 * power.DETECTED * error, times * noise)
    missed = 0.0
    for number in range(tries):

        def report(label: str, part: float, number: int = number) -> None:
            progress(label, (number + part) / tries)

        measured = power.measure(
            found.setting, fresh, found.directions, gain=level, settings=settings, progress=report
        )  # fmt: skip
        if math.isfinite(measured.smallest):
            break
        level, missed = level * MORE, max(0.0, measured.planted.value)
    between = math.sqrt(missed * max(0.0, measured.planted.value))
    return dataclasses.replace(measured, smallest=max(measured.smallest, between))


def _split(found: comparison.Comparison) -> SplitTest | None:
    directions = found.directions
    if directions is None:
        return None
    mixtures = [getattr(head, "components", 1) for head in found.heads.values()]
    return SplitTest(
        found=directions.found,
        null=directions.null,
        judged=directions.judged,
        sure=directions.sure,
        components=max(mixtures, default=1),
        gain=found.split_gain,
    )


def _fit(found: comparison.Comparison, name: str) -> HeadFit:
    fits, head = found.fits[name], found.heads[name]
    same = Estimate(value=0.0, low=0.0, high=0.0)
    return HeadFit(
        head=name,
        components=1 if name in CONTROLS else getattr(head, "components", 1),
        parameters=fits[0].trained,
        loss=estimates.mean_over_seeds([one.losses for one in fits], found.blocks),
        gain=same if name == "softmax" else found.gain(name, "softmax"),
        gain_over_equal=same if name == "softmax_equal" else found.gain(name, "softmax_equal"),
        gain_by_seed=tuple(float(one.double().mean()) for one in found.differences(name, "softmax")),
        learning_rate=fits[0].rate,
        steps=fits[0].steps,
        converged=all(one.converged for one in fits),
        curve=tuple(CurvePoint(steps=steps, loss=loss) for steps, loss in fits[0].curve),
    )
