"""Question 6: what would a better head buy?

Every head is fitted on the same frozen states with the same budget (`frozen`): same tokens, same rows of W,
same number of learning rates tried, same stopping rule, each starting as the model's own output layer.

    softmax         control: rows h + M h + m, with M = 0 and m = 0 at the start, and W
    softmax_equal   control: the same plus a perceptron with as many parameters as mos adds to softmax
    mos, trunk      K rows h + M_k h + m_k with a gate (trunk: only the last quarter of a row differs)
    sigsoftmax      as softmax, with f(z) = z + logsigmoid(z) and a trained offset of the scores
    moss            as mos, with that f
    any other       that says of itself that it is worth trying (`candidates`)

A gain is the loss of the control minus the head's, token by token on held-out text, so that text which is
hard for both cancels. It says what a head buys this body, frozen, after a short fit; not what a body trained
with that head from the start would reach.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from fullrank.errors import FullrankError
from fullrank.fit import estimates, frozen
from fullrank.fit.controls import CONTROLS, Perceptron
from fullrank.heads import HEADS, Head, RowHead, build
from fullrank.heads.base import without_matrix
from fullrank.heads.contexts import Contexts
from fullrank.ops import Pointwise
from fullrank.results.diagnosis import BetterHead, Estimate, HeadFit


def candidates() -> tuple[str, ...]:
    """Heads that are worth trying, read one layer, and whose own parameters make rows: a function of the
    scores that is trained as well, as plif's, is not fitted here."""
    worth = [(name, _sketch(name)) for name, head in HEADS.items() if head.worth_trying and head.splits]
    return tuple(name for name, head in worth if head.pointwise.trained is None and head.states == 1)


class Rows(nn.Module):
    """What makes the rows of a head, without its matrix."""

    def __init__(self, head: RowHead) -> None:
        super().__init__()
        # `frozen` holds W, and counts and trains what is here.
        head.register_module("decoder", None)
        self.head = head

    def forward(self, states: list[Tensor]) -> tuple[Tensor, Tensor]:
        parts = self.head.flat_parts(states)
        return parts.rows, parts.log_prior


def better_head(
    setting: frozen.Setting,
    *,
    heads: Sequence[str] | None = None,
    components: int = 2,
    seeds: int = 2,
    rates: Sequence[float] = frozen.RATES,
    epochs: int = frozen.EPOCHS,
    progress: Callable[[str, float], None] = lambda label, share: None,
) -> BetterHead:
    """Fit the controls and the heads, each with several seeds."""
    known = candidates()
    heads = known if heads is None else heads
    unknown = [head for head in heads if head not in known]
    if unknown or components < 2 or seeds < 1:
        raise FullrankError(
            f"heads {', '.join(heads)} with {components} components and {seeds} seeds: expected some of "
            f"{', '.join(known)}, 2 or more components and 1 or more seeds"
        )
    if not setting.output.linear:
        # A soft cap already bends the scores: sigsoftmax on top of it is another function than the published.
        heads = [head for head in heads if not HEADS[head].offsets]
    names = (*CONTROLS, *heads)
    fits: dict[str, list[frozen.Fitted]] = {}
    for place, name in enumerate(names):
        fits[name] = []
        for seed in range(seeds):

            def report(share: float, name: str = name, place: int = place, seed: int = seed) -> None:
                progress(name, (place + (seed + share) / seeds) / len(names))

            fits[name].append(
                frozen.fit(
                    setting,
                    lambda name=name: _contexts(name, setting.output.width, components),  # type: ignore[misc]
                    pointwise=_pointwise(name),
                    offsets=_offsets(name),
                    # One seed races the learning rates, the others take its choice.
                    rates=rates if seed == 0 else (fits[name][0].rate,),
                    epochs=epochs,
                    seed=seed,
                    progress=report,
                )
            )
    return _record(setting, fits, components, seeds)


def _contexts(name: str, width: int, components: int) -> nn.Module:
    """The part of a head that makes rows from states."""
    if name == "softmax_equal":
        extra = (components - 1) * (width * width + width) + components * width
        return Perceptron(width, max(1, extra // (2 * width + 1)))
    if name == "softmax" or not list(_sketch(name).own_parameters()):
        # A head without maps of its own gets the control's: directions that all rows share come first.
        return Contexts(sources=((width, 1),), width=width, as_published=False)
    return Rows(_built(name, width, components))


def _built(name: str, width: int, components: int) -> RowHead:
    """The head for its rows alone."""
    # Not centred: on a frozen body the components' common part is what refits the mean row.
    known = {"components": components, "centred": False}
    options = {option: value for option, value in known.items() if option in HEADS[name].options()}
    with without_matrix():
        return cast(RowHead, build(name, hidden=width, vocab=1, **options))


def _sketch(name: str, components: int = 2) -> RowHead:
    """The head without numbers, to ask it what it is; no random number is drawn."""
    with torch.device("meta"):
        return _built(name, 2, components)


def _pointwise(name: str) -> Pointwise | None:
    """The head's own function of the scores; None is the model's."""
    if name in CONTROLS or type(head := _sketch(name)).pointwise is Head.pointwise:
        return None
    return head.pointwise


def _offsets(name: str) -> tuple[float, ...]:
    return () if name in CONTROLS else HEADS[name].offsets


def _record(
    setting: frozen.Setting, fits: dict[str, list[frozen.Fitted]], components: int, seeds: int
) -> BetterHead:
    held_out = setting.split.held_out
    blocks = held_out.blocks
    original = setting.output.losses(held_out.hidden, held_out.targets, setting.limit)
    rows = []
    for name, found in fits.items():
        rows.append(
            HeadFit(
                head=name,
                components=1 if name in CONTROLS else _sketch(name, components).components,
                parameters=found[0].parameters,
                loss=estimates.mean_over_seeds([one.losses for one in found], blocks),
                gain=_gain(fits["softmax"], found, blocks),
                gain_over_equal=_gain(fits["softmax_equal"], found, blocks),
                gain_by_seed=tuple(
                    float((control.losses - one.losses).double().mean())
                    for control, one in zip(fits["softmax"], found, strict=True)
                ),
                learning_rate=found[0].rate,
                steps=found[0].steps,
            )
        )
    high = [name for name in fits if name not in CONTROLS]
    best = min(high, key=lambda name: _chosen(fits[name])) if high else ""
    # Whichever control did better where it counts: a head must beat both.
    control = min(CONTROLS, key=lambda name: sum(float(one.losses.double().mean()) for one in fits[name]))
    nothing = estimates.around(math.nan, math.nan, 0)
    return BetterHead(
        original=estimates.mean(original, blocks),
        fits=tuple(rows),
        best=best,
        best_gain=_gain(fits[control], fits[best], blocks) if best else nothing,
        seeds=seeds,
        fit_tokens=len(setting.split.fit),
        held_out_tokens=len(held_out),
        trained_rows=len(setting.trained_rows),
    )


def _chosen(found: Sequence[frozen.Fitted]) -> float:
    return sum(one.choose_loss for one in found) / len(found)


def _gain(control: Sequence[frozen.Fitted], found: Sequence[frozen.Fitted], blocks: Tensor) -> Estimate:
    if control is found:
        return Estimate(value=0.0, low=0.0, high=0.0)
    differences = [one.losses - other.losses for one, other in zip(control, found, strict=True)]
    return estimates.mean_over_seeds(differences, blocks)
