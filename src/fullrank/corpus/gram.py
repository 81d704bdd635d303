"""The Gram matrix G = T'T of a table [C, V], which is never made unless it is small.

Its eigenvalues are the squared singular values of T. With the parts of a `Table`,

    G = D + B'B                                          D diagonal, B the branching rows
    G = P (D + B'B + s l' + l s' + C l l') P             for the log table, s = S'1, P = 1 - 11'/V

A column that no branching row touches meets no other one: its diagonal element is an eigenvalue, known
exactly, and the matrix that is left has only the columns of B. (Not so in the log table, where l joins all
columns.)

Of rows with few entries, most have pairs of tokens that other rows have, too. Their share N of B'B is summed
once into a sparse matrix, which costs less to apply than the rows; wide rows are kept as they are, because
their squares would fill the matrix.

`apply` costs sparse products only, `dense` makes the matrix. The trace, which is the squared Frobenius norm
of the table, comes from sums of squares and is exact up to rounding.
"""

from __future__ import annotations

import itertools
import operator
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import scipy.sparse as sparse
from numpy.typing import NDArray

from fullrank.corpus.table import Offset, Table

Floats = NDArray[np.float64]
THREADED = 1 << 20
"""Entries from which threads pay."""
NARROW = 8
"""Entries of a row up to which it is summed into N."""
OUTER = 1 << 24
"""Products of entries that one sparse Gram matrix of rows may take on the way to a dense one."""


class Gram:
    """The Gram matrix on the columns that are joined, and the eigenvalues of the others."""

    def __init__(self, table: Table) -> None:
        V = table.vocabulary
        touched = np.zeros(V, dtype=bool)
        if table.offset is not None:
            touched[:] = True
        for part in table.branching:
            touched[part.indices] = True
        self.columns: NDArray[np.int64] = np.flatnonzero(touched)
        """Columns that are joined, [n]."""
        self.alone: Floats = np.sort(table.diagonal[~touched])[::-1]
        """Eigenvalues of the others, falling."""
        self._diagonal = table.diagonal[touched]
        self._offset: Offset | None = table.offset
        self._contexts = table.contexts
        place = np.cumsum(touched, dtype=np.int32) - np.int32(1)
        n = len(self.columns)
        narrow, wide = _Narrow(n), []
        for part in table.branching:
            rows = sparse.csr_matrix((part.data, place[part.indices], part.indptr), shape=(part.shape[0], n))
            few = np.diff(rows.indptr) <= NARROW
            narrow.add(rows[np.flatnonzero(few)])
            if not few.all():
                wide.append(rows[np.flatnonzero(~few)])
        self._narrow = narrow.total()
        self._parts = tuple(wide)
        # CSC views of the same arrays: the transposed product needs no second copy.
        self._transposed = tuple(part.T for part in self._parts)
        self._threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
        self._slabs = _slabs(self._narrow, self._threads)
        self.diagonal = self._diagonal_of_all()
        self.trace = float(self.diagonal.sum())
        """Of the joined columns."""

    @property
    def size(self) -> int:
        """Joined columns, n."""
        return len(self.columns)

    @property
    def total(self) -> float:
        """The trace of all: the squared Frobenius norm of the table."""
        return self.trace + float(self.alone.sum())

    @property
    def entries(self) -> int:
        """Numbers that the matrix is kept as."""
        return self._narrow.nnz + sum(part.nnz for part in self._parts)

    def apply(self, vectors: Floats) -> Floats:
        """G times vectors [n, b]."""
        vectors = np.ascontiguousarray(vectors)
        if self._offset is None:
            return self._sparse_apply(vectors)
        offset, contexts = self._offset, self._contexts
        centred = vectors - vectors.mean(axis=0)
        result = self._sparse_apply(centred)
        along, sums = offset.log_unigram @ centred, offset.column_sums @ centred
        result += np.outer(offset.column_sums, along)
        result += np.outer(offset.log_unigram, sums + contexts * along)
        result -= result.mean(axis=0)
        return result

    def dense(self) -> Floats:
        """G, [n, n] in fp64, column by column in memory as LAPACK wants it."""
        n = self.size
        gram = np.zeros((n, n), order="F")
        for part in self._parts:
            _add_outer(gram, part)
        for first in range(0, n, 1024):
            gram[:, first : first + 1024] += self._narrow[first : first + 1024].toarray().T
        gram[np.arange(n), np.arange(n)] += self._diagonal
        if self._offset is not None:
            offset = self._offset
            # A slice at a time: whole outer products would be matrices of their own.
            for first in range(0, n, 1024):
                some = slice(first, first + 1024)
                gram[:, some] += np.outer(offset.column_sums, offset.log_unigram[some])
                gram[:, some] += np.outer(
                    offset.log_unigram, offset.column_sums[some] + self._contexts * offset.log_unigram[some]
                )
            means = gram.mean(axis=0)
            gram -= means
            gram -= (means - means.mean())[:, None]
        return gram

    def _sparse_apply(self, vectors: Floats) -> Floats:
        result = self._diagonal[:, None] * vectors
        if self._threads == 1 or self.entries < THREADED:
            result += self._narrow @ vectors
            result += self._outer(range(len(self._parts)), vectors)
            return result
        # Scipy's products let other threads run.
        with ThreadPoolExecutor(self._threads) as pool:
            slabs = [pool.submit(operator.matmul, slab, vectors) for slab in self._slabs]
            outers = [
                pool.submit(self._outer, range(first, len(self._parts), self._threads), vectors)
                for first in range(self._threads)
            ]
            result += np.concatenate([one.result() for one in slabs])
            for one in outers:
                result += one.result()
        return result

    def _outer(self, places: Sequence[int], vectors: Floats) -> Floats:
        total = np.zeros_like(vectors)
        for place in places:
            total += self._transposed[place] @ (self._parts[place] @ vectors)
        return total

    def _diagonal_of_all(self) -> Floats:
        diagonal = self._diagonal + self._narrow.diagonal()
        # B'B 1, which only the log table needs.
        row_sums = self._narrow @ np.ones(self.size)
        for part, transposed in zip(self._parts, self._transposed, strict=True):
            diagonal += np.bincount(part.indices, weights=np.square(part.data), minlength=self.size)
            if self._offset is not None:
                row_sums += transposed @ np.asarray(part.sum(axis=1)).ravel()
        self.scale = float(diagonal.sum() + self.alone.sum())
        """The trace before rows were centred: rounding of `total` is in units of it."""
        if self._offset is None:
            return diagonal
        # With A = D + B'B + s l' + l s' + C l l' and P = 1 - 11'/V, the diagonal of P A P is
        # A_vv - 2 (A 1)_v / V + 1'A1 / V², and l is centred, so that l'1 = 0.
        offset, n = self._offset, self.size
        everything = row_sums + self._diagonal + offset.log_unigram * offset.column_sums.sum()
        diagonal += 2 * offset.column_sums * offset.log_unigram
        diagonal += self._contexts * np.square(offset.log_unigram)
        self.scale = float(diagonal.sum())
        return diagonal - 2 * everything / n + everything.sum() / n**2


def _slabs(matrix: sparse.csr_matrix, count: int) -> list[sparse.csr_matrix]:
    """The rows in `count` parts with like numbers of entries, without a copy."""
    cuts = np.searchsorted(matrix.indptr, np.linspace(0, matrix.nnz, count + 1)[1:-1])
    ends = [0, *(int(cut) for cut in cuts), matrix.shape[0]]
    result = []
    for first, last in itertools.pairwise(ends):
        begin, end = matrix.indptr[first], matrix.indptr[last]
        result.append(
            sparse.csr_matrix(
                (matrix.data[begin:end], matrix.indices[begin:end], matrix.indptr[first : last + 1] - begin),
                shape=(last - first, matrix.shape[1]),
            )
        )
    return result


class _Narrow:
    """The sum of many sparse matrices, added in pairs of like size as in a binary counter."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._waiting: list[tuple[int, sparse.csr_matrix]] = []

    def add(self, rows: sparse.csr_matrix) -> None:
        self._push(0, (rows.T @ rows).tocsr())

    def total(self) -> sparse.csr_matrix:
        result = sparse.csr_matrix((self._size, self._size))
        while self._waiting:
            result = result + self._waiting.pop()[1]
        return result

    def _push(self, rank: int, matrix: sparse.csr_matrix) -> None:
        while self._waiting and self._waiting[-1][0] == rank:
            matrix = matrix + self._waiting.pop()[1]
            rank += 1
        self._waiting.append((rank, matrix))


def _add_outer(gram: Floats, rows: sparse.csr_matrix) -> None:
    """gram += B'B for some rows: sparse products of narrow rows, dense ones of wide rows."""
    width = np.diff(rows.indptr).astype(np.int64)
    wide = width * width > OUTER // 64
    narrow = np.flatnonzero(~wide)
    if wide.any():
        dense = rows[np.flatnonzero(wide)]
        for first in range(0, dense.shape[0], 256):
            block = dense[first : first + 256].toarray()
            # In column slices, so that no second matrix of this size comes to be.
            for begin in range(0, gram.shape[1], 2048):
                gram[:, begin : begin + 2048] += block.T @ block[:, begin : begin + 2048]
    if not len(narrow):
        return
    work = np.cumsum(width[narrow] ** 2)
    cuts = np.searchsorted(work, np.arange(0, work[-1], OUTER))
    for first, last in zip(cuts, [*cuts[1:], len(narrow)], strict=True):
        if last > first:
            some = rows[narrow[first:last]]
            product = (some.T @ some).tocoo()
            gram[product.row, product.col] += product.data
