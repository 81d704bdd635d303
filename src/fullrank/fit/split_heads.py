"""Mixtures with their components apart along directions of `splitting`: a start that does not stall.

Equal components are a saddle. Here each of K components is moved to a corner of a simplex along K - 1
directions at once, as far as the text for choosing likes best.
"""

from __future__ import annotations

import copy
import math

import torch
from torch import Tensor

from fullrank.fit import estimates
from fullrank.fit.setting import Setting
from fullrank.fit.splitting import Directions
from fullrank.fit.trainee import SAMPLED_PIECE, Trainee
from fullrank.heads.mixture import MixtureHead
from fullrank.results import Estimate

SCALES = tuple(2.0**power for power in range(-4, 4))
"""Of the step along the directions, to choose from."""


def codes(components: int) -> Tensor:
    """[K, K - 1] corners of a simplex: mean zero, and a unit covariance."""
    from scipy.linalg import helmert

    return torch.from_numpy(math.sqrt(components) * helmert(components).T.copy())


def split(head: MixtureHead, directions: Directions, scale: float) -> MixtureHead:
    """A copy of a mixture whose components stand apart along the directions, sharing W."""
    number = min(head.components - 1, len(directions.found))
    maps, shifts = directions.step(number)
    return moved(head, scale * codes(head.components)[:, :number].to(maps), maps, shifts)


def moved(head: MixtureHead, codes: Tensor, maps: Tensor, shifts: Tensor) -> MixtureHead:
    """A copy of a mixture, sharing W, with component k moved by sum_j codes[k, j] (maps[j] h + shifts[j])."""
    weight = head.decoder.weight
    found = copy.deepcopy(head, {id(weight): weight})
    found.contexts.split(codes, maps, shifts)
    return found


@torch.no_grad()
def apart(setting: Setting, head: MixtureHead, directions: Directions) -> tuple[MixtureHead, float, Estimate]:
    """The split with the lowest loss on the text for choosing, its scale, and its gain there, of which only
    the scale was chosen there; the head as it is, 0 and nothing where none is better."""
    before = choose_losses(setting, head)
    best, least, chosen, gained = head, before, 0.0, torch.zeros_like(before)
    for scale in SCALES:
        found = split(head, directions, scale)
        losses = choose_losses(setting, found)
        if losses.mean() < least.mean():
            best, least, chosen, gained = found, losses, scale, before - losses
        elif chosen:
            break
    return best, chosen, estimates.mean(gained, setting.parts.choose.blocks.flatten())


@torch.no_grad()
def choose_losses(setting: Setting, head: MixtureHead) -> Tensor:
    """[tokens] nats of the text for choosing."""
    trainee = Trainee(head, setting, 0).to(setting.parts.fit.targets.device)
    trainee.eval()
    places = torch.arange(len(setting.parts.choose), device=setting.parts.choose.targets.device)
    return torch.cat([trainee.batch_losses(False, some) for some in places.split(SAMPLED_PIECE)])
