"""How the learning rate goes over a run, as a factor on its highest value.

    cosine      rises over the warm-up, falls to `final` as half a cosine
    constant    rises, and stays
    wsd         rises, stays, and falls over the last `decay` of the run as 1 - sqrt (Hägele et al. 2024,
                2405.18392): a run can be branched off before its fall and go on, and be ended anywhere

Progress is in steps of a known number of them, or in any other measure of a budget.
"""

from __future__ import annotations

import math
from typing import Literal

Schedule = Literal["cosine", "constant", "wsd"]


def factor(
    schedule: Schedule, step: float, steps: float, *, warmup: float, decay: float, final: float
) -> float:
    """The factor for the step that follows `step` done ones of `steps`. `warmup` and `decay` are shares."""
    rising = max(1, round(warmup * steps))
    if step < rising:
        return (step + 1) / rising
    if schedule == "constant":
        return 1.0
    if schedule == "cosine":
        progress = min(1.0, (step - rising) / max(1, steps - rising))
        return final + (1 - final) * (1 + math.cos(math.pi * progress)) / 2
    falling = max(1, round(decay * steps))
    progress = min(1.0, max(0.0, (step - (steps - falling)) / falling))
    return 1.0 - (1.0 - final) * math.sqrt(progress)
