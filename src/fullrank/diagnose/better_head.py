"""Question 6: what would a better head buy?

Every head is fitted on the same frozen states with the same budget (`frozen`): same tokens, same rows of W,
same number of learning rates tried, same stopping rule, each starting as the model's own output layer.

    softmax         control: rows h + M h + m, with M = 0 and m = 0 at the start, and W
    softmax_equal   control: the same plus a perceptron with as many parameters as mos adds to softmax
    mos, trunk      K rows h + M_k h + m_k with a gate (trunk: only the last quarter of a row differs)
    sigsoftmax      as softmax, with f(z) = z + logsigmoid(z) and a trained offset of the scores
    moss            as mos, with that f

A gain is the loss of the control minus the head's, token by token on held-out text, so that text which is
hard for both cancels. It says what a head buys this body, frozen, after a short fit; not what a body trained
with that head from the start would reach.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from torch import Tensor, nn

from fullrank.diagnose import estimates, frozen
from fullrank.errors import FullrankError
from fullrank.heads.contexts import Contexts
from fullrank.ops import SIGSOFTMAX
from fullrank.results.diagnosis import BetterHead, Estimate, HeadFit

CONTROLS = ("softmax", "softmax_equal")
HEADS = ("sigsoftmax", "mos", "moss", "trunk")
OFFSETS = (0.0, 5.0, 10.0, 20.0, 40.0)
"""Starts of sigsoftmax's offset: at the last it is softmax."""


class Perceptron(nn.Module):
    """One context from h + M h + m + U gelu(V h + v), U = 0 at the start: softmax with more parameters."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.linear = Contexts(sources=((width, 1),), width=width, as_published=False)
        self.enter, self.leave = nn.Linear(width, inner), nn.Linear(inner, width, bias=False)
        nn.init.normal_(self.enter.weight, std=width**-0.5)
        nn.init.zeros_(self.enter.bias)
        nn.init.zeros_(self.leave.weight)

    def forward(self, states: list[Tensor]) -> tuple[Tensor, Tensor]:
        contexts, log_prior = self.linear(states)
        added = self.leave(nn.functional.gelu(self.enter(states[0])))
        return contexts + added[..., None, :], log_prior


def better_head(
    setting: frozen.Setting,
    *,
    heads: Sequence[str] = HEADS,
    components: int = 2,
    seeds: int = 2,
    rates: Sequence[float] = frozen.RATES,
    epochs: int = frozen.EPOCHS,
    progress: Callable[[str, float], None] = lambda label, share: None,
) -> BetterHead:
    """Fit the controls and the heads, each with several seeds."""
    unknown = [head for head in heads if head not in HEADS]
    if unknown or components < 2 or seeds < 1:
        raise FullrankError(
            f"heads {', '.join(heads)} with {components} components and {seeds} seeds: expected some of "
            f"{', '.join(HEADS)}, 2 or more components and 1 or more seeds"
        )
    if not setting.output.linear:
        # A soft cap already bends the scores: sigsoftmax on top of it is another function than the published.
        heads = [head for head in heads if head not in ("sigsoftmax", "moss")]
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
                    pointwise=SIGSOFTMAX if name in ("sigsoftmax", "moss") else None,
                    offsets=OFFSETS if name in ("sigsoftmax", "moss") else (),
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
    count = components if name in ("mos", "moss", "trunk") else 1
    private = max(1, width // 4) if name == "trunk" else None
    return Contexts(sources=((width, count),), width=width, as_published=False, private=private)


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
                components=components if name in ("mos", "moss", "trunk") else 1,
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
