"""How text becomes tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """How text becomes tokens."""

    level: Literal["words", "bytes", "bpe"] = "words"
    """words: split at spaces, one <eos> a line; bytes: 256 values and an end; bpe: byte-level BPE."""
    vocabulary_from: Literal["train", "all"] = "train"
    """Whose words make the vocabulary. The published word-level protocol takes all three splits."""
    bpe_size: int = 8192
    """Entries of a BPE vocabulary that is trained on the training split."""
    tokenizer: str = ""
    """A tokenizer.json to use instead of training one (level=bpe)."""
    valid_share: float = 0.05
    """Of the lines, the part that becomes the validation split where none is given."""
    test_share: float = 0.05
    """Of the lines, the part that becomes the test split where none is given."""
