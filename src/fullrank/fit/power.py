"""What gain would these fits have seen? A gain is planted in the same states, and they look for it.

The refitted output layer is split into K components along directions drawn at random,

    p(y | h) = 1/K Σ_k softmax( W (r + s Σ_j c_kj (M_j x)) ),      c the corners of a simplex

tokens are drawn from that in place of the text's own, and the same fits are made on them: the control, then
the mixture from its splitting directions. The truth is known token by token, so that on held-out text

    planted   the refitted softmax's loss minus that of the true mixture
    found     the same minus the fitted mixture's

With the share that is found and the spread of what is found over blocks of text, the smallest gain that would
have been told from zero four times in five is 2.8 standard errors over that share.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import torch
from torch import Tensor

from fullrank.fit import comparison, estimates, sampling, split_heads, splitting, training
from fullrank.fit.setting import Setting, layer_of, plain_rows, prepare
from fullrank.fit.states import Part, Parts
from fullrank.heads import Head
from fullrank.heads.mixture import MixtureHead
from fullrank.models.output_layer import OutputLayer
from fullrank.results.diagnosis import Power

DETECTED = 2.8
"""Standard errors at which an effect is told from zero at 95% four times in five: 1.96 + 0.84."""
FOUND = 0.4
"""Share of a planted gain that must be found for it to count as seen."""
FARTHEST = 5.0
"""How much smaller than the planted gain one may be that is said to be seen too: of less, less is found.
Where a smaller one was planted and missed, half-way to it, as ratios go."""
COVERED = 0.5
"""Of all directions: where fewer were looked at, nothing is known of the others."""
SURE = 1.5
"""Times the gain below which splitting finds nothing: what it finds."""
TOKENS = 128
"""On which the size of what is planted is set."""


@torch.no_grad()
def plant(
    setting: Setting, directions: splitting.Directions, *, components: int, gain: float, seed: int
) -> Planted:
    """Targets from a split of the setting's plain head, with about this gain over it."""
    generator = torch.Generator().manual_seed(seed)
    basis = directions.basis
    shape = components - 1, basis.rows.shape[1], basis.states.shape[1] + 1
    drawn = torch.randn(shape, generator=generator).to(basis.rows)
    drawn /= drawn.flatten(1).norm(dim=1)[:, None, None]
    maps, shifts = splitting.in_units(basis, drawn)
    codes = split_heads.codes(components).to(maps)
    made = Planted(
        output=layer_of(setting.plain),
        maps=torch.einsum("kj,jdh->kdh", codes, maps),
        shifts=torch.einsum("kj,jd->kd", codes, shifts),
        scale=1.0,
    )
    some = setting.parts.fit
    at = torch.linspace(0, len(some) - 1, min(TOKENS, len(some)), device=some.targets.device).long()
    plain, hidden = plain_rows(setting.plain, some)[at], some.states[0].flatten(0, 1)[at]
    low, high = 0.0, 1.0
    while made.at(high).divergence(plain, hidden) < gain and high < 1e4:
        high *= 2
    for _ in range(12):
        middle = (low + high) / 2
        if made.at(middle).divergence(plain, hidden) < gain:
            low = middle
        else:
            high = middle
    return made.at(high)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Planted:
    """A mixture of known components over a plain head's matrix, all with the same prior."""

    output: OutputLayer
    maps: Tensor
    """[K, D, H]"""
    shifts: Tensor
    """[K, D]"""
    scale: float

    def at(self, scale: float) -> Planted:
        return dataclasses.replace(self, scale=scale)

    def row(self, component: int, plain: Tensor, states: Tensor) -> Tensor:
        return plain + self.scale * (states @ self.maps[component].T + self.shifts[component])

    @torch.no_grad()
    def divergence(self, plain: Tensor, states: Tensor) -> float:
        """KL(mixture || plain head), nats per token."""
        total = [
            torch.log_softmax(self.output.logits(self.row(component, plain, states)), dim=1)
            for component in range(len(self.maps))
        ]
        mixed = torch.stack(total).logsumexp(dim=0) - math.log(len(total))
        base = torch.log_softmax(self.output.logits(plain), dim=1)
        return float((mixed.exp() * (mixed - base)).sum(dim=1).mean())

    @torch.no_grad()
    def targets(self, plain: Tensor, states: Tensor, limit: int, generator: torch.Generator) -> Tensor:
        """[N] a token each."""
        which = torch.randint(len(self.maps), (len(plain),), generator=generator, device=plain.device)
        rows = plain.clone()
        for component in range(len(self.maps)):
            mine = which == component
            rows[mine] = self.row(component, plain[mine], states[mine])
        found = [
            sampling.draw(torch.softmax(self.output.logits(piece), dim=1), 1, generator)[:, 0]
            for piece in self.output.pieces(rows, limit // 2)
        ]
        return torch.cat(found)

    @torch.no_grad()
    def losses(self, plain: Tensor, states: Tensor, targets: Tensor, limit: int) -> Tensor:
        """[N] nats."""
        found = [
            -self.output.losses(self.row(component, plain, states), targets, limit)
            for component in range(len(self.maps))
        ]
        return math.log(len(found)) - torch.stack(found).logsumexp(dim=0)


def measure(
    setting: Setting,
    head: MixtureHead,
    directions: splitting.Directions,
    *,
    gain: float,
    settings: comparison.Settings,
    progress: Callable[[str, float], None] = lambda stage, share: None,
) -> Power:
    """Plant a gain in a setting whose plain head is fitted, and look for it with a mixture over that head.

    Both race their learning rates anew: what they want where there is much to gain is not what they want
    where there is nothing.
    """
    made = plant(setting, directions, components=head.components, gain=gain, seed=settings.seed + 1)
    generator = torch.Generator(device=setting.parts.fit.targets.device).manual_seed(settings.seed + 2)
    limit = setting.limit

    def replanted(part: Part) -> Part:
        plain, states = plain_rows(setting.plain, part), part.states[0].flatten(0, 1)
        drawn = made.targets(plain, states, limit, generator).view(part.targets.shape)
        return dataclasses.replace(part, targets=drawn)

    progress("planting a gain", 0.0)
    parts = Parts(
        fit=replanted(setting.parts.fit),
        choose=replanted(setting.parts.choose),
        held_out=replanted(setting.parts.held_out),
    )
    planted = prepare(
        setting.plain, parts, rows=settings.rows, exact=setting.sampled is None, matrix=setting.matrix,
        limit=limit, seed=settings.seed,
    )  # fmt: skip
    held_out = parts.held_out
    blocks = held_out.blocks.flatten()
    rows, states = plain_rows(setting.plain, held_out), held_out.states[0].flatten(0, 1)
    truth = made.losses(rows, states, held_out.targets.flatten(), limit)

    def fit(setting: Setting, one: Head, label: str, place: int) -> tuple[training.Fitted, dict[str, Tensor]]:
        return training.train_in_turn(
            setting, one, comparison.plan_for(setting, one, settings), seed=settings.seed,
            progress=lambda share: progress(label, (place + share) / 3),
        )  # fmt: skip

    control, weights = fit(planted, planted.plain, "planted gain: the control", 0)
    fitted = planted
    if planted.matrix:
        fitted = comparison.rebased_setting(planted, weights, control.rate)
    started, _, _ = comparison.started(
        fitted, {head.name: head}, settings, lambda share: progress("planted gain: split", (1 + share) / 3)
    )
    mixture, _ = fit(fitted, started[head.name], f"planted gain: {head.name}", 2)
    there = estimates.mean(control.losses - truth, blocks)
    found = control.losses - mixture.losses
    seen = estimates.mean(found, blocks)
    share = min(1.0, seen.value / there.value) if there.value > 0 else 0.0
    error = estimates.mean_and_error(found, blocks)[1]
    # Where most of it was missed, what would have been seen of less is anybody's guess.
    smallest = math.inf
    if seen.low > 0 and share >= FOUND:
        smallest = max(DETECTED * error / share, there.value / FARTHEST, SURE * directions.least)
    return Power(
        planted=there, found=seen, smallest=smallest, converged=control.converged and mixture.converged,
        covered=directions.covered,
    )  # fmt: skip
