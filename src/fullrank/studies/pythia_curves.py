"""`fullrank study pythia`: which public Pythias turn, and why.

Whether they turn, what the narrow ones lost by the scaling law of the wide ones, and what a smaller batch at
equal width changes. No training: the published evaluations are tested.

The file is the one of docs/series.md: columns model, shots, step and metrics, made from the evaluations in
EleutherAI/pythia.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from fullrank.diagnose.series import series
from fullrank.results import Series
from fullrank.results.grid import Statement

STATEMENT = Statement(
    question="Which public Pythias turn late in training, what did the narrow ones lose by the scaling law "
    "of the wide ones, and does a smaller batch at equal width change it?",
    hypothesis="70m and 160m turn, models of 410m and more do not (Godey et al., 2404.07647), and at a "
    "smaller batch the same width turns less (2602.20433).",
    comparison="Each model's curve with level curves of correlated noise; final losses with a law fitted to "
    "models of 400m parameters and more; models of one size with each other.",
    smallest=0.02,
    rule="Turned where p is below 1% over all curves and at least 2% were lost; a law's prediction is missed "
    "where its 95% interval for one more model does not hold the loss; two models differ where a test of the "
    "difference is below 1% over all pairs.",
)
TOKENS_PER_STEP = 2_097_152
"""Of the eight main models."""


def run(curves: Path, *, progress: Callable[[str, float], None], seed: int = 0) -> Series:
    return series.run([curves], tokens_per_step=TOKENS_PER_STEP, progress=progress, seed=seed)
