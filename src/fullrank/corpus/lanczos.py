"""Leading eigenvalues of a symmetric operator by block Lanczos, with residual bounds.

From a random block the basis Q of a Krylov space grows by blocks of vectors; each is made orthogonal to all
before it, twice, so the basis is orthonormal to rounding. With T = Q'GQ and its eigenpairs (θ, s), the Ritz
vectors are x = Q s, and the residual |G x - θ x| = |R s_last|, where R couples the last block to the next,
costs nothing. Every interval [θ - residual, θ + residual] holds an eigenvalue of G. That no leading one is
missed is certain only in the limit, but a random block meets every eigenvector.

When the basis has grown to its largest allowed size, it is replaced by its best Ritz vectors and goes on
(thick restart; Wu & Simon 2000), so memory is bounded.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import scipy.linalg
from numpy.typing import NDArray

Floats = NDArray[np.float64]
BLOCK = 8
TOLERANCE = 1e-6
"""Of a residual, relative to its own eigenvalue."""
RESTARTS = 40


@dataclasses.dataclass(frozen=True, kw_only=True)
class Leading:
    """Eigenvalues, falling, and how far each can be from a true one."""

    values: Floats
    residuals: Floats
    """One a value, in the units of the values."""
    vectors: Floats
    """[n, k], orthonormal."""
    products: int
    """Vectors that the operator was applied to."""


def leading(
    apply: Callable[[Floats], Floats],
    size: int,
    count: int,
    *,
    generator: np.random.Generator,
    most: int | None = None,
    tolerance: float = TOLERANCE,
    progress: Callable[[float], None] = lambda share: None,
) -> Leading:
    """The `count` largest eigenvalues of a positive semidefinite operator; `most` vectors at a time."""
    count, block = min(count, size), BLOCK
    most = max(most or 4 * count, count + 8 * block)
    if size <= most + 2 * block:
        return _dense(apply, size, count)
    basis = np.empty((size, most + block), order="F")
    projected = np.zeros((most, most))
    basis[:, :block], _ = _orthonormal(generator.standard_normal((size, block)), basis[:, :0], generator)
    done, products, restarts, look = 0, 0, 0, count + 4 * block
    while True:
        # basis[:, :done] has been through the operator, the next block has not.
        image = apply(basis[:, done : done + block])
        products += block
        done += block
        known = basis[:, :done]
        along = known.T @ image
        image -= known @ along
        projected[:done, done - block : done] = along
        projected[done - block : done, :done] = along.T
        basis[:, done : done + block], coupling = _orthonormal(image, known, generator)
        full = done + block > most
        if not full and done < look:
            progress(min(done / (3 * count), 1.0) / 2)
            continue
        look = done + max(2 * block, done // 8)
        part = projected[:done, :done]
        values, vectors = scipy.linalg.eigh((part + part.T) / 2, check_finite=False)
        values, vectors = values[::-1], vectors[:, ::-1]
        residuals = np.linalg.norm(coupling @ vectors[done - block :], axis=0)
        good = residuals[:count] <= tolerance * np.maximum(values[:count], tolerance * values[0])
        progress(0.5 + float(good.sum()) / count / 2)
        if good.all() or restarts >= RESTARTS:
            return Leading(
                values=np.maximum(values[:count], 0.0),
                residuals=residuals[:count],
                vectors=known @ vectors[:, :count],
                products=products,
            )
        if full:
            restarts += 1
            keep = count + (done - count) // 2
            basis[:, :keep] = known @ vectors[:, :keep]
            basis[:, keep : keep + block] = basis[:, done : done + block].copy()
            projected[:] = 0.0
            projected[np.arange(keep), np.arange(keep)] = values[:keep]
            done, look = keep, keep + (most - keep) // 2


def _dense(apply: Callable[[Floats], Floats], size: int, count: int) -> Leading:
    """All eigenvalues of an operator that is hardly larger than the basis."""
    matrix = apply(np.eye(size))
    values, vectors = scipy.linalg.eigh((matrix + matrix.T) / 2, check_finite=False)
    rounding = 10 * np.finfo(np.float64).eps * max(float(values[-1]), 0.0)
    return Leading(
        values=np.maximum(values[::-1][:count], 0.0),
        residuals=np.full(count, rounding),
        vectors=vectors[:, ::-1][:, :count],
        products=size,
    )


def _orthonormal(vectors: Floats, against: Floats, generator: np.random.Generator) -> tuple[Floats, Floats]:
    """An orthonormal block Q that spans the vectors and is orthogonal to `against`, and R with vectors = Q R.

    Where the vectors depend on each other, as when the Krylov space is exhausted, random ones fill the block.
    """
    Q, R = np.linalg.qr(vectors)
    size = np.abs(np.diag(R))
    scale = max(float(size.max(initial=0.0)), np.finfo(np.float64).tiny)
    weak = size <= 1e-10 * scale
    if weak.any():
        Q[:, weak] = generator.standard_normal((len(Q), int(weak.sum())))
        R[weak] = 0.0
    # The vectors have been made orthogonal once; random ones have not.
    for _ in range(2 if weak.any() else 1):
        Q -= against @ (against.T @ Q)
        Q, turn = np.linalg.qr(Q)
        R = turn @ R
    return Q, R
