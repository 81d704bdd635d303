"""Rank, geometry and attention of a model in training: a pass of its body, and `diagnose.monitors` on it."""

from __future__ import annotations

import torch
from torch import Tensor

from fullrank.diagnose import monitors
from fullrank.diagnose.attention.monitor import watching
from fullrank.models import FullrankForCausalLM


@torch.no_grad()
def measure(
    model: FullrankForCausalLM, ids: Tensor, *, seed: int = 0, rank_contexts: int | None = None
) -> monitors.Monitors:
    """Every monitor that applies to the model, from ids [batch, time], each row of a text of its own.

    Every module's training flag is left as it was; the rest is as `monitors.measure` has it.
    """
    if ids.ndim != 2:
        # Before the body complains in its own words.
        return monitors.measure(model.lm_head, [], ids)
    with monitors.evaluating(model), torch.autocast(ids.device.type, enabled=False):
        with watching(model.model, ids) as attention:
            states = model.head_inputs(ids).states
        found = monitors.measure(model.lm_head, states, ids, seed=seed, rank_contexts=rank_contexts)
        return found | attention
