"""Charts and the one-file HTML page of a result record; reads results only, and renders without torch."""

from fullrank.report.page import render, write

__all__ = ["render", "write"]
