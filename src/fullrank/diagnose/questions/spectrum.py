"""Question 2: the spectrum of the output matrix W [V, D].

With singular values σ and p = σ / Σσ:

    effective rank       exp H(p)                  Roy & Vetterli 2007
    singular entropy     KL(p || uniform) = log D - H(p)    Godey et al. 2024 (2404.07647)
    stable rank          Σσ² / σ₁²
    participation ratio  (Σσ²)² / Σσ⁴
    condition            σ₁ / σ_D

so that effective rank = D exp(-singular entropy): one number in two coats. They come from the D x D Gram
matrix in fp64, which is faster than an SVD (results/spectrum_peers.json); it squares the condition number, so
where the smallest values fall below 1e-5 of the largest, QR and an SVD of the small factor replace it.

Rounding to the storage format adds an error of deviation s to every entry, and a matrix of such errors has
norm near s (sqrt V + sqrt D), somewhat more where rows or columns are of uneven size: values below that
`noise` say nothing about the model.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from fullrank.errors import FullrankError
from fullrank.results.diagnosis import Spectrum
from fullrank.theory.rank import ROUNDINGS, UNIT_ROUNDOFF

GGUF = {"F32": "float32", "F64": "float64", "F16": "float16", "BF16": "bfloat16"}
BITS = {"Q8": 8, "Q6": 6, "Q5": 5, "Q4": 4, "Q3": 3, "Q2": 2, "IQ4": 4, "IQ3": 3, "IQ2": 2, "IQ1": 1.6}


def spectrum(weight: Tensor, storage: str = "float32") -> Spectrum:
    """The spectrum of W, with the noise that its storage format ("bfloat16", "Q8_0", ...) explains."""
    if weight.ndim != 2 or min(weight.shape) < 2:
        raise FullrankError(f"the matrix has shape {list(weight.shape)}, expected [V, D] of at least 2 x 2")
    sigma = singular_values(weight)
    if not float(sigma[0]) > 0:
        raise FullrankError(f"the matrix {list(weight.shape)} is all zeros: its weights were not loaded")
    shares = sigma / sigma.sum()
    entropy = -float(torch.special.xlogy(shares, shares).sum())
    squares = sigma.square()
    noise, origin = storage_noise(weight, storage)
    return Spectrum(
        singular_values=tuple(sigma.tolist()),
        singular_entropy=math.log(len(sigma)) - entropy,
        effective_rank=math.exp(entropy),
        random_effective_rank=random_effective_rank(*weight.shape),
        stable_rank=float(squares.sum() / squares[0]),
        participation_ratio=float(squares.sum() ** 2 / squares.square().sum()),
        condition=float(sigma[0] / sigma[-1]) if sigma[-1] > 0 else math.inf,
        numerical_rank=int((sigma > noise).sum()),
        noise=noise,
        noise_origin=origin,
    )


def singular_values(weight: Tensor) -> Tensor:
    """All min(V, D) of them, falling, in fp64."""
    tall = weight if weight.shape[0] >= weight.shape[1] else weight.T
    gram = gram_matrix(tall)
    if not bool(torch.isfinite(gram).all()):
        raise FullrankError(
            f"the matrix {list(weight.shape)} holds NaN or infinite numbers, expected finite ones: the "
            "checkpoint is damaged, or was converted to half precision beyond its range"
        )
    values = torch.linalg.eigvalsh(gram).flip(0).clamp(min=0).sqrt()
    if values[-1] > 1e-5 * values[0]:
        return values
    return torch.linalg.svdvals(triangle(part.double() for part in tall.split(8192)))


def triangle(slices: Iterable[Tensor]) -> Tensor:
    """R of the QR decomposition of slices of rows, one above the other: no more than two live at once."""
    factor: Tensor | None = None
    for rows in slices:
        stacked = rows if factor is None else torch.cat([factor, rows])
        factor = torch.linalg.qr(stacked, mode="r").R
    assert factor is not None
    return factor


def gram_matrix(tall: Tensor) -> Tensor:
    """AᵀA in fp64, a slice of rows at a time: an fp64 copy of a large matrix would not fit beside it."""
    gram = torch.zeros(tall.shape[1], tall.shape[1], dtype=torch.float64, device=tall.device)
    for rows in tall.split(8192):
        rows = rows.double()
        gram.addmm_(rows.T, rows)
    return gram


def centred_gram(
    tall: Tensor, rows: Tensor | None = None, columns: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The mean row, and the Gram matrix of the rows less their mean, in fp64.

    With factors of the rows [V] and columns [D] it is that of the centred matrix scaled by them. Each slice
    is centred first: Σ w wᵀ less the mean's share would cancel where the mean is large.
    """
    slices = tall.split(8192)
    rows = torch.ones(len(tall), device=tall.device) if rows is None else rows
    columns = torch.ones(tall.shape[1], device=tall.device) if columns is None else columns
    mean = torch.stack([part.double().sum(dim=0) for part in slices]).sum(dim=0) / len(tall)
    gram = torch.zeros(tall.shape[1], tall.shape[1], dtype=torch.float64, device=tall.device)
    for part, factor in zip(slices, rows[:, None].split(8192), strict=True):
        gram += gram_matrix((part.double() - mean) * factor * columns)
    return mean, gram


def storage_noise(
    weight: Tensor, storage: str, rows: Tensor | None = None, columns: Tensor | None = None
) -> tuple[float, str]:
    """The norm of the error that rounding to the storage format makes, and in words where it comes from.

    With factors of the rows [V] and columns [D] it is that of the matrix scaled by them after the rounding.
    """
    spread = math.sqrt(weight.shape[0]) + math.sqrt(weight.shape[1])
    rows = torch.ones(weight.shape[0], device=weight.device) if rows is None else rows
    columns = torch.ones(weight.shape[1], device=weight.device) if columns is None else columns
    storage = GGUF.get(storage, storage)
    dtype = getattr(torch, storage, None)
    if dtype in UNIT_ROUNDOFF:
        # `theory.rank` measured the factors: for fp32 and fp64 they allow for a matrix that was itself made
        # by a product in that precision, such as W = A B, whose errors grow with the width.
        unit = ROUNDINGS[dtype] * UNIT_ROUNDOFF[dtype]
        deviation = unit * _root_mean_square(weight, rows, columns) / math.sqrt(3.0)
        return deviation * spread, f"rounding in {storage}"
    bits = next((BITS[key] for key in BITS if storage.upper().startswith(key)), None)
    if bits is None:
        return 0.0, f"unknown: no error model for {storage}"
    # Blocks of 32 share one scale, so that their largest entry fills the range of integers; an even error of
    # one step has deviation step / sqrt(12).
    width = weight.shape[1] - weight.shape[1] % 32
    if width == 0:
        return 0.0, f"unknown: rows are shorter than a block of {storage}"
    largest = weight[:, :width].reshape(weight.shape[0], -1, 32).abs().amax(dim=-1).double()
    step = largest / (2.0 ** (bits - 1) - 1) if bits > 1.6 else largest
    scaled = step.square() * columns[:width].double().view(-1, 32).square().mean(dim=1)
    deviation = math.sqrt(float((scaled.mean(dim=1) * rows.double().square()).mean()) / 12.0)
    return deviation * spread, f"quantisation to {storage}, taken as blocks of 32 with one scale each"


def random_effective_rank(V: int, D: int) -> float:
    """Of a Gaussian matrix, from the Marchenko-Pastur law: D exp(-KL) in the limit of large V and D."""
    large, small = max(V, D), min(V, D)
    ratio = small / large
    low, high = (1 - math.sqrt(ratio)) ** 2, (1 + math.sqrt(ratio)) ** 2
    # With λ = middle + half cos θ the density's square-root ends become smooth, and the midpoint rule exact.
    theta = (np.arange(4096) + 0.5) * np.pi / 4096
    middle, half = (low + high) / 2, (high - low) / 2
    eigenvalue = middle + half * np.cos(theta)
    density = (half * np.sin(theta)) ** 2 / np.maximum(eigenvalue, 1e-300)
    density /= density.sum()
    sigma = np.sqrt(eigenvalue)
    mean = float((density * sigma).sum())
    share = sigma / mean
    return small * math.exp(-float((density * share * np.log(np.maximum(share, 1e-300))).sum()))


def _root_mean_square(weight: Tensor, rows: Tensor, columns: Tensor) -> float:
    total = 0.0
    for part, factor in zip(weight.split(8192), rows.split(8192), strict=True):
        total += float((part.double() * columns * factor[:, None]).square().sum())
    return math.sqrt(total / weight.numel())
