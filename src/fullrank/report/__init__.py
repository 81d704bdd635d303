"""Charts and the one-file HTML page of a result record; reads results only, and renders without torch."""

from fullrank.report.page import render, write
from fullrank.report.picture import check_installed

__all__ = ["check_installed", "render", "write"]
