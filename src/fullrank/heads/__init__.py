"""The heads of the literature as small files over one primitive."""

from fullrank.heads.base import Head, RowHead
from fullrank.heads.cache import CacheHead
from fullrank.heads.memory import Memory
from fullrank.heads.record import MixtureRecord
from fullrank.heads.registry import HEADS, build
from fullrank.heads.store import Store

__all__ = ["HEADS", "CacheHead", "Head", "Memory", "MixtureRecord", "RowHead", "Store", "build"]
