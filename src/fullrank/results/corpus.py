"""The record of a corpus: how many dimensions its table of next-token distributions needs."""

from __future__ import annotations

import dataclasses
import typing

from fullrank.results.diagnosis import Estimate


@dataclasses.dataclass(frozen=True, kw_only=True)
class CorpusNull:
    """The same table with next tokens shuffled within classes of contexts that were seen equally often."""

    dimensions: dict[str, int]
    relative_error: tuple[float, ...]
    """On the grid of the curve."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CorpusCurve:
    """Relative error against dimension of one construction of the table."""

    construction: str
    """probability, weighted, frequent or log."""
    contexts: int
    """Rows of the table."""
    vocabulary: int
    """Columns."""
    least: int | None
    """Of frequent: contexts that were seen fewer times are left out."""
    prior: float | None
    """Of log: weight of the unigram prior, in tokens."""
    norm: float
    """Frobenius norm of the table."""
    singular_values: tuple[float, ...]
    """The leading ones, falling; all of them where there are no more than that."""
    singular_value_error: float
    """Bound of their errors."""
    method: str
    """exact, by the Gram matrix, or lanczos."""
    bound: str
    """In one sentence: how far the figures can be off, documents apart."""
    dimensions: dict[str, int]
    """Smallest d whose relative error is at most 50, 10, 1%, under "50", "90", "99"."""
    dimension_limits: dict[str, tuple[int, ...]]
    """Lower and upper limit of each by the method; equal to it where it is exact."""
    dimension_intervals: dict[str, Estimate] | None
    """95% intervals over blocks of text; None where they were not asked for or cannot be had."""
    beyond_first: dict[str, int]
    """The same dimensions for the error relative to what is left after the first one."""
    beyond_first_limits: dict[str, tuple[int, ...]]
    grid: tuple[int, ...]
    """Dimensions d, rising."""
    relative_error: tuple[float, ...]
    """sqrt(sum of squared singular values beyond d) / norm, one a dimension of the grid."""
    relative_error_limits: tuple[tuple[float, ...], ...]
    """Lower and upper limits by the method, in this order, on the grid."""
    relative_error_interval: tuple[tuple[float, ...], ...] | None
    """Lower and upper ends of the 95% interval over blocks of text, on the grid."""
    blocks: int
    """Blocks of text that the intervals are over; 0 where there are none."""
    null: CorpusNull | None
    seconds: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Corpus:
    """Everything `fullrank corpus dimension` found about one corpus."""

    kind: typing.ClassVar[str] = "corpus"
    version: typing.ClassVar[int] = 1

    name: str
    sources: tuple[str, ...]
    sha256: str
    """Of the text, as it was read."""
    tokenizer: str
    order: int
    """A context is the order - 1 tokens before a token."""
    engine: str
    documents: int
    bytes: int
    """Of text."""
    replaced: int
    """Bytes that were no UTF-8 and became U+FFFD."""
    tokens: int
    pairs: int
    """Tokens with a whole context before them: what the table counts."""
    contexts: int
    """Distinct ones."""
    entries: int
    """Distinct pairs of context and next token."""
    vocabulary: int
    """Tokens that the tokeniser has."""
    used: int
    """Tokens that occur as a next token."""
    single: int
    """Contexts that were followed by one token only, so that their row has a single entry."""
    curves: tuple[CorpusCurve, ...]
    """One a construction; figures of two constructions are about different tables."""
    seconds: dict[str, float]
    """By stage."""
    notes: tuple[str, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Corpora:
    """Several corpora side by side."""

    kind: typing.ClassVar[str] = "corpora"
    version: typing.ClassVar[int] = 1

    title: str
    corpora: tuple[Corpus, ...]
    notes: tuple[str, ...]
