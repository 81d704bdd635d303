"""Tiny models for the tests beside this."""

from tests.tiny_models import ids, padded, quiet_transformers, tiny_model

__all__ = ["ids", "padded", "quiet_transformers", "tiny_model"]
