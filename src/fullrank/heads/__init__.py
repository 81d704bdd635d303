"""The heads of the literature as small files over one primitive."""

from fullrank.heads.base import HEADS, Head
from fullrank.heads.cache import CacheHead
from fullrank.heads.memory import Memory
from fullrank.heads.record import MixtureRecord
from fullrank.heads.registry import build
from fullrank.heads.rows import RowHead
from fullrank.heads.start import Start
from fullrank.heads.store import Store

__all__ = ["HEADS", "CacheHead", "Head", "Memory", "MixtureRecord", "RowHead", "Start", "Store", "build"]
