"""The model is one of the installed package fullrank: nothing else is in here."""

from fullrank.models import FullrankConfig  # noqa: F401
