"""Question 3: anisotropy by layer. Do the states of a layer point everywhere, or one way?

With unit states u_i the mean cosine over ordered pairs i != j has a closed form, linear in the number of
states (Godey et al. 2024, 2404.07647, define it as a double sum):

    A = ( |Σ u_i|² - n ) / ( n² - n )

It is taken as it stands and after the mean state is subtracted, since a common offset alone makes states
parallel. The interval is a bootstrap over blocks of text, in which a state is never paired with its own copy:
with block sums S_b, sizes n_b and multiplicities c_b

    A* = ( |Σ c_b S_b|² - Σ c_b² n_b ) / ( (Σ c_b n_b)² - Σ c_b² n_b ).

Left out are the first position of a window and positions of outsized norm ("attention sinks"): few states,
hundreds of times longer than the rest, that would stand for the whole layer's variance.

Outlier dimensions stand beside it: coordinates with many times their even share of the variance make cosines
by themselves.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from fullrank.errors import FullrankError
from fullrank.results.diagnosis import Anisotropy, Estimate, LayerGeometry, OutlierDimension

REPLICATES = 400
SINK = 6.0
"""A state this many times longer than its layer's median is a sink."""
OUTLIER_SHARE = 10.0
"""A dimension is an outlier from this multiple of its even share on, and from 1% of the variance."""
LISTED = 8


def anisotropy(
    layers: Tensor, positions: Tensor, blocks: Tensor, names: Sequence[str], *, seed: int = 0
) -> Anisotropy:
    """From states [layers, n, D], their positions in their window [n] and blocks of text [n]."""
    if layers.ndim != 3 or layers.shape[1] != len(blocks) or len(blocks) != len(positions):
        raise FullrankError(
            f"states have shape {list(layers.shape)} for {len(positions)} positions, {len(blocks)} blocks: "
            "expected [layers, n, D] with one of each a state"
        )
    rows = [
        layer_geometry(states, positions, blocks, layer=number, name=name, seed=seed)
        for number, (states, name) in enumerate(zip(layers, names, strict=True))
    ]
    return Anisotropy(tokens=len(positions), layers=tuple(rows))


def layer_geometry(
    states: Tensor, positions: Tensor, blocks: Tensor, *, layer: int, name: str, seed: int = 0
) -> LayerGeometry:
    states = states.double()
    length = states.norm(dim=1)
    usual = length[positions > 0].median() if (positions > 0).any() else length.median()
    kept = (positions > 0) & (length <= SINK * usual) & (length > 0)
    sinks = int((~kept).sum())
    if int(kept.sum()) < 3:
        raise FullrankError(
            f"layer {layer} has {int(kept.sum())} states left beside sinks, expected 3 or more: use more text"
        )
    states, blocks = states[kept], blocks[kept]
    centred = states - states.mean(dim=0)
    variance = centred.square().mean(dim=0)
    total = float(variance.sum())
    singular = torch.linalg.svdvals(centred) if len(centred) < centred.shape[1] else _singular(centred)
    shares = singular / singular.sum().clamp(min=1e-300)
    kurtosis = centred.pow(4).mean(dim=0) / variance.square().clamp(min=1e-300)
    return LayerGeometry(
        layer=layer,
        name=name,
        cosine=mean_cosine(states, blocks, seed=seed),
        cosine_centred=mean_cosine(centred, blocks, seed=seed),
        top_variance_share=float(singular[0] ** 2 / singular.square().sum().clamp(min=1e-300)),
        effective_rank=float(torch.exp(-torch.special.xlogy(shares, shares).sum())),
        outliers=_outliers(variance, kurtosis, total),
        largest_kurtosis=float(kurtosis[variance > 0].max()) if total > 0 else float("nan"),
        sinks=sinks,
    )


def mean_cosine(states: Tensor, blocks: Tensor, *, seed: int = 0) -> Estimate:
    """The mean cosine of two different states, with a bootstrap interval over blocks."""
    unit = torch.nn.functional.normalize(states.double(), dim=1)
    numbers, place = torch.unique(blocks, return_inverse=True)
    sums = torch.zeros(len(numbers), unit.shape[1], dtype=torch.float64, device=unit.device)
    sums.index_add_(0, place, unit)
    sizes = torch.bincount(place, minlength=len(numbers)).double()
    centre = float(_cosine(torch.ones(1, len(numbers), dtype=torch.float64), sums.cpu(), sizes.cpu())[0])
    if len(numbers) < 2:
        return Estimate(value=centre, low=-1.0, high=1.0)
    drawn = _cosine(_drawn(len(numbers), seed), sums.cpu(), sizes.cpu()).numpy()
    # Drawing a block twice pairs its states more often than the text does, which lifts the whole
    # distribution; its width is what is wanted of it.
    low, high = np.nanquantile(drawn, (0.025, 0.975)) - np.nanmean(drawn) + centre
    return Estimate(value=centre, low=float(low), high=float(high))


@functools.lru_cache(maxsize=1)
def _drawn(blocks: int, seed: int) -> Tensor:
    """How often every replicate has every block: the same for all layers, and dearer than what follows."""
    generator = np.random.default_rng(seed)
    counts = generator.multinomial(blocks, np.full(blocks, 1 / blocks), size=REPLICATES)
    return torch.from_numpy(counts).double()


def _cosine(counts: Tensor, sums: Tensor, sizes: Tensor) -> Tensor:
    same = counts.square() @ sizes
    pairs = (counts @ sizes).square() - same
    cosine = ((counts @ sums).square().sum(dim=1) - same) / pairs
    # One state drawn again and again makes no pair: rounding over zero, not a cosine.
    return torch.where(pairs > 0, cosine, torch.nan)


def _singular(centred: Tensor) -> Tensor:
    return torch.linalg.eigvalsh(centred.T @ centred).flip(0).clamp(min=0).sqrt()


def _outliers(variance: Tensor, kurtosis: Tensor, total: float) -> tuple[OutlierDimension, ...]:
    if total <= 0:
        return ()
    shares = variance / total
    least = max(OUTLIER_SHARE / len(shares), 0.01)
    order = torch.argsort(shares, descending=True)[:LISTED]
    return tuple(
        OutlierDimension(
            dimension=int(place), variance_share=float(shares[place]), kurtosis=float(kurtosis[place])
        )
        for place in order
        if float(shares[place]) >= least
    )
