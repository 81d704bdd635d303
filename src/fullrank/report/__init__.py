"""Charts and the one-file HTML page of a result record; reads results only, and renders without torch."""

from fullrank.report.charts.picture import check_installed
from fullrank.report.registry import render, render_comparison, write, write_comparison

__all__ = ["check_installed", "render", "render_comparison", "write", "write_comparison"]
