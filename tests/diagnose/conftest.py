"""Tiny models on disk and fewer simulations for the tests of this folder."""

from tests.level_curves import few_simulations
from tests.prose import text
from tests.tiny_checkpoints import few_orderings, tiny_checkpoint, tiny_tokenizer

__all__ = ["few_orderings", "few_simulations", "text", "tiny_checkpoint", "tiny_tokenizer"]
