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
    """To use instead of training one (level=bpe): a tokenizer.json, a model's directory, a .gguf file or a
    hub name. Rows of messages, FILE#messages, become text by its chat template."""
    vocabulary_size: int = 0
    """Ids of a BPE vocabulary at least, where a matrix is to have more rows than the tokenizer has entries;
    the ids of --tokens without a tokenizer."""
    documents: Literal["file", "line", "blank"] = "file"
    """What a document is in a file of plain text: the file, a line, or what stands between blank lines."""
    valid_share: float = 0.05
    """Of every training source, the part before its end that becomes the validation split where none is
    named."""
    test_share: float = 0.05
    """Of every training source, the end that becomes the test split where none is named."""
