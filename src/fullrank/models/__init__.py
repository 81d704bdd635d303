"""Bodies without a head, and the language model that joins one with a head."""

from fullrank.models.body import Body, BodyOutput
from fullrank.models.language_model import LanguageModel, Prediction

__all__ = ["Body", "BodyOutput", "LanguageModel", "Prediction"]
