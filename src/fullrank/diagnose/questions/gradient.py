"""Question 8: how much of the logit gradient reaches the body?

The loss of a token has gradient g = softmax - onehot in the V logits. Through a linear head the body receives
Wᵀ g, which depends on g only through its projection P g on the D columns of W. Per token

    kept norm    |P g| / |g|           kept energy    |P g|² / |g|²

Under a soft cap g is multiplied by the cap's slope first. A random subspace of dimension D keeps the energy
D / V: without that null beside it the figure says nothing. P g = Q Qᵀ g with W = Q R, and Qᵀ g = R⁻ᵀ Wᵀ g, so
that one product more than the loss gives it.

What it means is disputed. Godey & Artzi (2603.10145) hold the suppressed part, 95 to 99% of the norm, against
the head; Murugan (2608.16671) finds in small models that this part trains W itself and that such figures did
not predict progress.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fullrank.diagnose.questions.spectrum import gram_matrix
from fullrank.fit import estimates
from fullrank.models.output_layer import CHUNK_BYTES, OutputLayer
from fullrank.results.diagnosis import Gradient

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)


@torch.no_grad()
def gradient(
    hidden: Tensor, targets: Tensor, blocks: Tensor, output: OutputLayer, *, limit: int = CHUNK_BYTES
) -> Gradient:
    """From states [N, D], their targets [N] and blocks of text [N]."""
    whiten = whitening(output.weight)
    energies = []
    # Two V-wide tables live at once: scores, and under a soft cap their slope.
    size = max(1, limit // (8 * output.vocabulary))
    for states, wanted in zip(hidden.split(size), targets.split(size), strict=True):
        energies.append(_kept_energy(states, wanted, output, whiten))
    energy = torch.cat(energies).cpu()
    norm, rank = energy.sqrt(), whiten.shape[1]
    return Gradient(
        kept_norm=estimates.mean(norm, blocks),
        kept_energy=estimates.mean(energy, blocks),
        null_norm=math.sqrt(rank / output.vocabulary),
        null_energy=rank / output.vocabulary,
        tokens=len(energy),
        quantiles=tuple(torch.quantile(norm, torch.tensor(QUANTILES, dtype=norm.dtype)).tolist()),
    )


def whitening(weight: Tensor) -> Tensor:
    """[D, r] such that its transpose turns Wᵀ g into the coordinates of P g in an orthonormal basis."""
    values, vectors = torch.linalg.eigh(gram_matrix(weight))
    kept = values > 1e-12 * values[-1]
    return vectors[:, kept] / values[kept].sqrt()


def _kept_energy(states: Tensor, targets: Tensor, output: OutputLayer, whiten: Tensor) -> Tensor:
    if output.linear:
        scores = output.logits(states)
        slope = None
    else:
        raw = states @ output.weight.T
        if output.bias is not None:
            raw += output.bias
        bent = output.pointwise.evaluate_(raw, gradient=True)
        scores, slope = bent.value, bent.slope
    slopes = torch.softmax(scores, dim=1)
    slopes[torch.arange(len(targets), device=slopes.device), targets] -= 1.0
    if slope is not None:
        slopes *= slope
    reached = (slopes @ output.weight).double() @ whiten
    # The sum of V squares in fp32 errs by some 1e-5: torch adds pairwise.
    return (reached.square().sum(dim=1) / slopes.square().sum(dim=1).double()).clamp(max=1.0)
