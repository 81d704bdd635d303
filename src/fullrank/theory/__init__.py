"""Theorems as functions: what a softmax of a given width can and cannot say. Proofs: docs/theory.md."""

from fullrank.theory.argmax import ArgmaxReport, unargmaxable
from fullrank.theory.argmax_search import Certificate
from fullrank.theory.capacity import CapacityReport, is_free, top_m_capacity
from fullrank.theory.factorise import Factorisation, factorise
from fullrank.theory.rank import LeastRank, ShiftClassRanks, expressible, least_rank, shift_class_ranks

__all__ = [
    "ArgmaxReport",
    "CapacityReport",
    "Certificate",
    "Factorisation",
    "LeastRank",
    "ShiftClassRanks",
    "expressible",
    "factorise",
    "is_free",
    "least_rank",
    "shift_class_ranks",
    "top_m_capacity",
    "unargmaxable",
]
