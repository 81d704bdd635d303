"""The build of a model that has one of our heads, where `anatomy` has nothing to find: the head is asked.

    one row a token     the head is f(W x + b) of one row x: softmax, low_rank, moc, sigsoftmax, plif. Its
                        layer is W, b and f, its states are the rows
    anything else       mixtures, mixtape, facets, pointer, cache: there is no single layer; W is what its
                        parts share

A short probe says which norm the last state comes from, how many dimensions that takes, and that no state
sees later tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn

from fullrank.errors import FullrankError
from fullrank.heads.base import Head
from fullrank.heads.low_rank import LowRank
from fullrank.heads.rows import RowHead
from fullrank.heads.softmax import Softmax
from fullrank.models import anatomy
from fullrank.models.loading import Loaded, quiet
from fullrank.models.output_layer import OutputLayer
from fullrank.ops import IDENTITY, PiecewiseLinear, Pointwise, Softcap
from fullrank.results.diagnosis import ModelFacts


def has_own_head(model: Any) -> bool:
    return hasattr(model, "head_inputs")


def one_row(head: Head) -> bool:
    """Whether the head is f(W x + b) of one row x a token. The head is asked: moc is, and mos is not."""
    if not isinstance(head, RowHead):
        return False
    like = head.decoder.weight
    with torch.no_grad():
        made, _ = head.rows([like.new_zeros(1, 1, width) for width in head.state_widths])
    return made.shape[-2] == 1


def rows(head: Head, states: list[Tensor]) -> Tensor:
    """The row of each token [batch, time, D], of a head that makes one."""
    return cast(RowHead, head).rows(states)[0][..., 0, :]


def described(head: Head) -> str:
    components = getattr(head, "components", 0)
    if isinstance(head, RowHead) and components > 1:
        return f"a mixture of {components} components ({head.name})"
    return f"the head {head.name}"


def output_of(head: Head, tokens: int) -> OutputLayer:
    """W, b and f in fp32, copies; of a mixture, what its components share. `tokens` rows have a name."""
    bias = head.decoder.bias
    pointwise: Pointwise = head.pointwise if isinstance(head, RowHead) else IDENTITY
    if isinstance(pointwise, PiecewiseLinear):
        pointwise = dataclasses.replace(pointwise, slopes=pointwise.slopes.detach())
    return OutputLayer(
        weight=head.decoder.weight.detach().float().clone(),
        bias=None if bias is None else bias.detach().float().clone(),
        pointwise=pointwise,
        tokens=tokens,
    )


def examine(loaded: Loaded) -> anatomy.Anatomy:
    """As `anatomy.examine`."""
    model: Any = loaded.model
    head: Head = model.lm_head
    output = output_of(head, anatomy.named_tokens(loaded, head.vocab))
    norm = _probe(model, output.tokens)
    name, lost = anatomy.norm_rank(norm, biased=output.bias is not None)
    # Of a projection the states keep as many dimensions as it has; what is not linear fills the width.
    rank = head.width
    if isinstance(head, Softmax):
        rank = min(head.width, head.hidden - lost)
    elif isinstance(head, LowRank):
        rank = min(head.down.out_features, head.hidden - lost)
    blocks = anatomy.blocks_of(model)
    facts = ModelFacts(
        name=loaded.name,
        source=loaded.source,
        architecture=f"{type(model.model).__name__} with {head.name}",
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        layers=len(blocks),
        width=head.width,
        vocabulary=head.vocab,
        tokens=output.tokens,
        tied=model.config.tie_word_embeddings,
        bias=output.bias is not None,
        logit_scale=model.config.logit_scale,
        softcap=output.pointwise.cap if isinstance(output.pointwise, Softcap) else None,
        final_norm=name,
        storage=loaded.storage,
        dtype=str(model.dtype).removeprefix("torch."),
        fingerprint=loaded.fingerprint,
        notes=(*loaded.notes, *_notes(head, output, model)),
    )
    return anatomy.Anatomy(output=output, facts=facts, states_rank=rank, blocks=blocks)


def _notes(head: Head, output: OutputLayer, model: Any) -> Iterator[str]:
    if not one_row(head):
        yield (
            f"The output layer is {described(head)}: the matrix is what its parts share, and the width is "
            "that of its rows."
        )
    elif not isinstance(head, Softmax) or head.width != head.hidden:
        yield "What enters the output matrix is the row that the head makes of the last layer's state."
    if model.config.tie_word_embeddings:
        yield "The output matrix is tied: it is the input embedding as well."
    if output.vocabulary > output.tokens:
        yield anatomy.padding_note(output)
    if one_row(head) and output.bias is not None:
        yield "The output layer has a bias: one dimension more than the width."


@torch.no_grad()
def _probe(model: Any, named: int) -> tuple[nn.Module, Tensor] | None:
    """The norm that the last state comes from, if any."""
    ids, half = anatomy.probe_ids(model, named)
    with anatomy.norms_that_run(model) as ran, quiet():
        state = model.head_inputs(ids).states[0]
    anatomy.require_causal(model, state, half)
    for module, result in reversed(ran):
        if result.shape == state.shape and torch.equal(result.to(state.dtype), state):
            return module, result
    return None


def check_one_matrix(model: Any) -> None:
    """Raise unless the head is one matrix on the body's last state."""
    head = model.lm_head
    if not isinstance(head, Softmax) or head.width != head.hidden:
        what = f"a {head.name} head" if not isinstance(head, Softmax) else "a projection before its matrix"
        raise FullrankError(
            f"the model has {what} already, {model.config.head}: give its original, or a model whose head is "
            "one matrix on its last state, such as a run with --head softmax and head.width=0"
        )
