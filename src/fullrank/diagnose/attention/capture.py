"""Queries, keys, values and weights out of any transformers model, while it runs, at chosen queries only.

Models of today call an attention function by name, with q, k, v, the mask, the scale and the soft cap. One of
ours is put in that place: it runs the model's own eager attention, some queries at a time, so the model
computes what it always does, and weights are those that the model itself gives. From queries and keys

    l = cap(scale q k^T) + bias,   w = softmax(l) over what the mask lets a query see

are recomputed at the same queries, and the largest difference between the two is kept. Where they agree, l
are the scores; where a model does more (a learnt sink, say), the logarithms of its weights stand for them,
which are l up to a constant of the row.

Older models call nothing by name. They are asked for `output_attentions`, one text at a time: the weights are
the model's own, and queries, keys and values stay unknown.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from fullrank.errors import FullrankError
from fullrank.models.anatomy import states
from fullrank.models.attention import attention_layers, attention_scores, repeated
from fullrank.models.loading import quiet

NAME = "fullrank_watched"
AGREEMENT = {torch.float32: 1e-4, torch.float64: 1e-8}
HALF_AGREEMENT = 2e-2
"""How far recomputed weights may lie from the model's own, by dtype, and in half precision at least."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Seen:
    """One layer's attention at the chosen queries. H heads, R queries, L positions, B texts."""

    layer: int
    weights: Tensor
    """[B, H, R, L] the model's own."""
    scores: Tensor
    """[B, H, R, L] what softmax was applied to, -inf where hidden."""
    visible: Tensor
    """[B, H, R, L]."""
    values: Tensor | None
    """[B, H, L, D] of the keys' heads, repeated for every head that reads them."""
    reach: Tensor | None
    """[B, H, R] the largest |l| that |q| and the visible |k| allow; None where the scores are not l."""
    key_heads: int
    difference: float
    """The largest between recomputed weights and the model's own; NaN where nothing could be recomputed."""


class _Watcher:
    """What the attention function does while a model is watched."""

    def __init__(
        self, rows: Tensor, take: Callable[[Seen], None] | None, memory: int, keep: int | None
    ) -> None:
        self.rows, self.take, self.memory, self.keep = rows, take, memory, keep
        self.calls = 0

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        **options: Any,
    ) -> tuple[Tensor, None]:
        layer = getattr(module, "layer_idx", None)
        layer = layer if isinstance(layer, int) else self.calls
        self.calls += 1
        if mask is not None and mask.shape[-1] > key.shape[-2]:
            mask = mask[..., : key.shape[-2]]
        # A few buffers as large as the weights are alive at once.
        each = 6 * query.shape[0] * query.shape[1] * key.shape[-2] * query.element_size()
        pieces = torch.arange(query.shape[-2], device=query.device).split(max(1, self.memory // each))
        outputs, weights = [], []
        for piece in pieces:
            part = slice(int(piece[0]), int(piece[-1]) + 1)
            output, found = _own(module, query, key, value, mask, part, options)
            if self.keep is not None:
                output, found = _largest_only(found, value, self.keep)
            outputs.append(output)
            if self.take is not None:
                chosen = self.rows[(self.rows >= part.start) & (self.rows < part.stop)] - part.start
                weights.append(found[:, :, chosen.to(found.device)])
        if self.take is not None:
            own = torch.cat(weights, dim=2).float()
            self.take(_seen(layer, own, query, key, value, mask, self.rows.to(query.device), options))
        return torch.cat(outputs, dim=1), None


def _own(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    part: slice,
    options: dict[str, Any],
) -> tuple[Tensor, Tensor]:
    """Output [B, r, H, D] and weights [B, H, r, L] of some queries, by the model's own eager function."""
    eager = inspect.unwrap(type(module).forward).__globals__.get("eager_attention_forward")
    some, given = _of_rows(mask, part), {**options}
    if isinstance(options.get("position_bias"), Tensor):
        given["position_bias"] = _of_rows(options["position_bias"], part)
    if eager is not None:
        output, weights = eager(module, query[:, :, part], key, value, some, **given)
        if isinstance(weights, Tensor):
            return output, weights
    scores, visible = recomputed(query[:, :, part], key, some, given)
    weights = torch.softmax(scores.float(), dim=-1).to(value.dtype).masked_fill(~visible, 0.0)
    return (weights @ repeated(value, query.shape[1])).transpose(1, 2), weights


def _of_rows(table: Tensor | None, rows: slice | Tensor) -> Tensor | None:
    """The rows of a mask or bias [..., queries or 1, L] that belong to some queries."""
    return table if table is None or table.shape[-2] == 1 else table[..., rows, :]


def _largest_only(weights: Tensor, value: Tensor, keep: int) -> tuple[Tensor, Tensor]:
    """Only the `keep` largest weights of a row count, as they are, without sharing out the rest."""
    count = min(keep, weights.shape[-1])
    largest = weights.topk(count, dim=-1)
    kept = torch.zeros_like(weights).scatter_(-1, largest.indices, largest.values)
    return (kept @ repeated(value, weights.shape[1])).transpose(1, 2), kept


def recomputed(
    query: Tensor, key: Tensor, mask: Tensor | None, options: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """Scores [B, H, r, L] with -inf where hidden, and what is visible."""
    known = {name: options.get(name) for name in ("scaling", "softcap")}
    scores, visible = attention_scores(query, key, mask, **known)
    position = options.get("position_bias")
    if isinstance(position, Tensor):
        scores = scores + position
    if visible is None:
        visible = torch.ones_like(scores, dtype=torch.bool)
    return scores.masked_fill(~visible, -torch.inf), visible


def _seen(
    layer: int,
    own: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    rows: Tensor,
    options: dict[str, Any],
) -> Seen:
    some, given = _of_rows(mask, rows), {**options}
    if isinstance(options.get("position_bias"), Tensor):
        given["position_bias"] = _of_rows(options["position_bias"], rows)
    chosen, keys = query[:, :, rows].float(), key.float()
    scores, visible = recomputed(chosen, keys, some, given)
    difference = float((torch.softmax(scores, dim=-1).nan_to_num(0.0) - own).abs().max())
    reach = None
    if difference <= _allowed(query.dtype, scores.masked_fill(~visible, 0.0)):
        reach = _reach(chosen, keys, scores, visible, given)
    else:
        scores = own.log().masked_fill(~visible, -torch.inf)
    return Seen(
        layer=layer,
        weights=own,
        scores=scores,
        visible=visible,
        values=repeated(value, query.shape[1]),
        reach=reach,
        key_heads=key.shape[1],
        difference=difference,
    )


def _allowed(dtype: torch.dtype, scores: Tensor) -> float:
    """How far recomputed weights may lie from those of a model in this dtype with these scores."""
    if dtype in AGREEMENT:
        return AGREEMENT[dtype]
    # A score is rounded in proportion to its size, which moves a weight by half as much; then the weight is.
    return max(HALF_AGREEMENT, torch.finfo(dtype).eps * (1 + float(scores.abs().max()) / 2))


def _reach(query: Tensor, key: Tensor, scores: Tensor, visible: Tensor, options: dict[str, Any]) -> Tensor:
    """The largest |l| [B, H, R] that the norms allow: cap(scale |q| max |k|), and the largest bias on top."""
    scaling, softcap = options.get("scaling"), options.get("softcap")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    norms = repeated(key, query.shape[1]).norm(dim=-1)[:, :, None, :].expand(visible.shape)
    reach = query.norm(dim=-1) * norms.masked_fill(~visible, 0.0).amax(-1) * abs(scale)
    plain = attention_scores(query, key, None, scaling=scaling, softcap=softcap)[0]
    bias = (scores - plain).masked_fill(~visible, 0.0).abs().amax(-1)
    return bias + (reach if softcap is None else softcap * torch.tanh(reach / softcap))


_current: list[_Watcher] = []


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    if not _current:
        raise FullrankError(f"the attention function {NAME} was called outside of a diagnosis")
    return _current[-1].attend(module, query, key, value, attention_mask, **options)


@contextlib.contextmanager
def watched(
    model: Any,
    rows: Tensor,
    take: Callable[[Seen], None] | None,
    *,
    memory: int = 1 << 28,
    keep: int | None = None,
) -> Iterator[_Watcher]:
    """While this lasts, the model hands every layer's attention at queries `rows` [R] to `take`.

    With `keep`, only that many of the largest weights of every query count, and they are not renormalised.
    """
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, eager_mask
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(NAME, _attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, eager_mask)
    watcher = _Watcher(rows, take, memory, keep)
    with implementation(model, NAME):
        _current.append(watcher)
        try:
            yield watcher
        finally:
            _current.pop()


@contextlib.contextmanager
def implementation(model: Any, name: str) -> Iterator[None]:
    """The model with another attention implementation, and with its own again afterwards."""
    configs = {id(one.config): one.config for one in model.modules() if hasattr(one, "config")}
    known = [config for config in configs.values() if getattr(config, "_attn_implementation", None)]
    before = [config._attn_implementation for config in known]
    try:
        for config in known:
            config._attn_implementation = name
        yield
    finally:
        # The outer configs first, as they were found: setting one sets those inside it too.
        for config, earlier in zip(known, before, strict=True):
            config._attn_implementation = earlier


def calls_by_name(model: Any) -> bool:
    """Whether the model calls its attention function by name, so that it can be watched."""
    try:
        attention_layers(model)
    except FullrankError:
        return False
    ids = torch.zeros(1, 2, dtype=torch.long, device=model.device)
    with watched(model, torch.tensor([1]), None) as watcher:
        states(model, ids)
    return watcher.calls > 0


@torch.no_grad()
def given_weights(model: Any, ids: Tensor, rows: Tensor, take: Callable[[Seen], None]) -> int:
    """Hand every layer's weights of texts [B, L] to `take`, one text at a time; the number of layers."""
    layers = 0
    for text in ids:
        with implementation(model, "eager"), quiet():
            try:
                found = model(input_ids=text[None].to(model.device), output_attentions=True, use_cache=False)
                tables = getattr(found, "attentions", None)
            except (TypeError, ValueError):
                tables = None
        tables = [one for one in tables or () if isinstance(one, Tensor) and one.dim() == 4]
        if not tables or tables[0].shape[-2:] != (len(text), len(text)):
            raise no_attention(model)
        layers = len(tables)
        causal = torch.arange(len(text)) <= rows[:, None]
        for layer, table in enumerate(tables):
            weights = table[:, :, rows.to(table.device)].float()
            visible = causal.to(table.device).expand(weights.shape)
            take(
                Seen(
                    layer=layer,
                    weights=weights,
                    scores=weights.log().masked_fill(~visible, -torch.inf),
                    visible=visible,
                    values=None,
                    reach=None,
                    key_heads=weights.shape[1],
                    difference=float("nan"),
                )
            )
    return layers


def no_attention(model: Any) -> FullrankError:
    return FullrankError(
        f"{type(model).__name__} has no attention that it shows, as Mamba and other recurrent models have "
        "none: ask the other questions of it"
    )
