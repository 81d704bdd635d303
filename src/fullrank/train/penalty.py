"""Penalties that hold the spectrum of W, or the spread of the states, where an experiment wants it.

    spectrum of W [V, D], λ the D eigenvalues of WᵀW, falling, scaled to a mean of one
        flat       Σ (λ_i - 1)² / D             all directions alike
        decay      Σ (λ_i - t_i)² / Σ t_i²      t_i ~ 1 / i, scaled alike: singular values fall as 1 / √i,
                                                no steeper than those of trained heads
        steep      likewise                     t_i ~ 1 / i²: singular values fall as 1 / i
    states h [n, H], m = |mean h|² / mean |h|², μ the eigenvalues of their centred covariance, scaled alike
        white      Σ (μ_i - 1)² / H + m         centred, all directions alike
        together   1 - m                        one direction for all, as where anisotropy is 1

Each is 0 where its aim is met, and none sees the scale of what it is of. A flat spectrum needs no
eigenvalues: with a mean of one Σ (λ_i - 1)² = |G|² - D of the scaled Gram matrix G. A product of D x D x V a
step is what W costs, beside 3 x N x D x V of the loss; states are a sample of the batch, every so-many-th.

A penalty is of a training step: evaluation does not see it, and the model has no part of it. Off, or with a
weight of 0, there is none and nothing is computed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fullrank.train.config import PenaltyConfig

SAMPLE = 2048
"""States of a batch that are looked at; at least four a dimension."""


class Penalties:
    """The penalties that are on, each times its weight."""

    def __init__(self, config: PenaltyConfig) -> None:
        self.config = config
        self.last: dict[str, Tensor] = {}
        """Each as it was in the last call, without its weight; detached."""

    @classmethod
    def of(cls, config: PenaltyConfig) -> Penalties | None:
        """None where nothing is on."""
        on = (config.spectrum != "none" and config.spectrum_weight) or (
            config.states != "none" and config.states_weight
        )
        return cls(config) if on else None

    def __call__(self, weight: Tensor, states: Tensor) -> Tensor:
        """From W [V, D] and the states [..., H] that the head reads."""
        config = self.config
        total = weight.new_zeros((), dtype=torch.promote_types(weight.dtype, torch.float32))
        with torch.autocast(weight.device.type, enabled=False):
            if config.spectrum != "none" and config.spectrum_weight:
                found = spectrum(weight, config.spectrum)
                self.last["spectrum"] = found.detach()
                total = total + config.spectrum_weight * found
            if config.states != "none" and config.states_weight:
                found = spread(sampled(states), config.states)
                self.last["states"] = found.detach()
                total = total + config.states_weight * found
        return total


def spectrum(weight: Tensor, aim: str) -> Tensor:
    """How far the spectrum of W [V, D] is from flat, or from its decay."""
    wide = _widened(weight)
    gram = _scaled(wide.T @ wide)
    if aim == "flat":
        return _unevenness(gram)
    place = torch.arange(1, len(gram) + 1, device=gram.device, dtype=gram.dtype)
    wanted = place ** (-2.0 if aim == "steep" else -1.0)
    wanted = wanted * (len(gram) / wanted.sum())
    # Their gradient is that of the eigenvectors' squares: equal eigenvalues do no harm.
    values = torch.linalg.eigvalsh(gram).flip(0)
    return (values - wanted).square().sum() / wanted.square().sum()


def spread(states: Tensor, aim: str) -> Tensor:
    """How far states [n, H] are from white or from lying together."""
    wide = _widened(states)
    mean = wide.mean(dim=0)
    shared = mean.square().sum() / wide.square().sum(dim=1).mean()
    if aim == "together":
        return 1.0 - shared
    centred = wide - mean
    return _unevenness(_scaled(centred.T @ centred)) + shared


def sampled(states: Tensor) -> Tensor:
    """At most so many states of a batch [..., H], from all over it."""
    flat = states.flatten(0, -2)
    step = -(-len(flat) // max(SAMPLE, 4 * flat.shape[1]))
    return flat[::step]


def _scaled(gram: Tensor) -> Tensor:
    return gram * (len(gram) / gram.diagonal().sum())


def _unevenness(gram: Tensor) -> Tensor:
    """The variance of the eigenvalues, whose mean is one."""
    return gram.square().sum() / len(gram) - 1.0


def _widened(values: Tensor) -> Tensor:
    return values.to(torch.promote_types(values.dtype, torch.float32))
