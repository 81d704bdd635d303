"""Tiny models on disk for the tests beside this."""

from tests.tiny_checkpoints import few_orderings, tiny_checkpoint, tiny_tokenizer

__all__ = ["few_orderings", "tiny_checkpoint", "tiny_tokenizer"]
