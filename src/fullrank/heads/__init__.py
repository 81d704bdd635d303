"""The heads of the literature as small files over one primitive."""

from fullrank.heads.base import Head, RowHead
from fullrank.heads.record import MixtureRecord
from fullrank.heads.registry import HEADS, build

__all__ = ["HEADS", "Head", "MixtureRecord", "RowHead", "build"]
