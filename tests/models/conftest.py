"""Tiny models for the tests beside this, in memory and on disk."""

from tests.tiny_checkpoints import few_orderings, tiny_checkpoint, tiny_tokenizer
from tests.tiny_models import ids, padded, quiet_transformers, tiny_model

__all__ = [
    "few_orderings", "ids", "padded", "quiet_transformers", "tiny_checkpoint", "tiny_model", "tiny_tokenizer",
]  # fmt: skip
