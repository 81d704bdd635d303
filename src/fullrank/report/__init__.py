"""Charts and the one-file HTML page of a result record; reads results only, and renders without torch."""

from fullrank.report.charts.picture import check_installed
from fullrank.report.registry import picture, render, render_comparison, write, write_comparison
from fullrank.report.standalone import Picture

__all__ = [
    "Picture",
    "check_installed",
    "picture",
    "render",
    "render_comparison",
    "write",
    "write_comparison",
]
