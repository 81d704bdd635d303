"""An upgraded model as a plain one, for runtimes that know no other head.

`closest` fits the plain softmax head that is nearest in KL over the states of a text; here it becomes a model
of the original's architecture, which transformers loads without this package. Its logits are compared with
what was fitted before it is handed on.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from fullrank.errors import FullrankError
from fullrank.fit import states
from fullrank.models import loading
from fullrank.ops import Pointwise
from fullrank.results.upgrade import Collapse
from fullrank.upgrade import training as fit
from fullrank.upgrade.closest import Closest, closest, softmax_log_probs
from fullrank.upgrade.plain import plain_model

CHECKED = 1e-3
"""Largest difference, in nats, between what was fitted and what the plain model computes in fp32."""


def collapse(
    model: Any,
    tokenizer: Any,
    text: Sequence[Path] = (),
    *,
    settings: fit.Settings | None = None,
    cache: Path,
    fingerprint: str = "",
    name: str = "",
    source: str = "",
    progress: fit.Progress = lambda stage, share: None,
) -> tuple[Any, Collapse]:
    """The plain transformers model closest to an upgraded one on a text, and what it costs.

    The two share the body. `model` is a `FullrankForCausalLM`; `name` and `source` are what `Loaded` says.
    """
    settings = fit.Settings() if settings is None else settings
    started = time.monotonic()
    plain, pointwise, scale = plain_model(model)
    seen = fit.read_text(
        model,
        tokenizer,
        text,
        settings=settings,
        cache=cache,
        fingerprint=fingerprint,
        progress=progress,
    )
    layer = plain.get_output_embeddings()
    found = closest(
        model.lm_head,
        seen.parts,
        pointwise=pointwise,
        bias=layer.bias is not None,
        settings=settings,
        progress=progress,
    )
    with torch.no_grad():
        layer.weight.copy_(found.weight)
        if layer.bias is not None and found.bias is not None:
            layer.bias.copy_(found.bias / scale)
    _check(plain, found, seen.parts.held_out, pointwise, model)
    origin = model.config.origin or {}
    base = name if source == "hub" else origin.get("name") if origin.get("source") == "hub" else ""
    record = Collapse(
        model=name or str(origin.get("name", "")),
        head=model.lm_head.name,
        architecture=type(plain).__name__,
        text=seen.facts,
        rows=found.rows,
        start=found.start,
        cost=found.cost,
        upgraded_loss=found.upgraded_loss,
        plain_loss=found.plain_loss,
        steps=found.steps,
        seconds=time.monotonic() - started,
        notes=("The output matrix is not tied to the input embedding.",),
        base_model=str(base),
    )
    return plain, record


@torch.no_grad()
def _check(plain: Any, found: Closest, part: states.Part, pointwise: Pointwise, model: Any) -> None:
    """Refuse a plain model that does not compute what was fitted, rather than hand it on."""
    ids = part.ids[:1, :24]
    with loading.quiet():
        logits = plain(input_ids=ids, use_cache=False).logits[0].float()
    expected = softmax_log_probs(part.states[0][0, :24], found.weight, found.bias, pointwise)
    difference = float((torch.log_softmax(logits, dim=-1) - expected).abs().max())
    precise = model.dtype in (torch.float32, torch.float64)
    if not difference <= (CHECKED if precise else 0.3):
        raise FullrankError(
            f"{type(plain).__name__} differs by {difference:.3g} nats from the head that was fitted for it: "
            "this architecture does something beside its output matrix, and is not taken"
        )
