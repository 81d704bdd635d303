"""Text and states of a training run, for a diagnosis: what `fit.collect` is for a transformers model.

The text is the run's test split, which is tokens already, or files in the run's vocabulary. It is cut into
windows of w tokens, and every token is predicted as in `evaluate`: the first of a window from the token
before it, the first of all from <eos>. A body with a context sees its window alone. One that carries a state
reads the whole text in order, `length` tokens at a time; a window is then only a part of the text.

Of a head that makes one row x [D] a token the rows are kept, of any other the states that it reads. They are
made anew each time and not kept on disk: a run's body is small beside the models that `fit.collect`
reads.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
import torch
from torch import Tensor

from fullrank.errors import FullrankError
from fullrank.fit import collect
from fullrank.fit.estimates import BLOCK
from fullrank.heads.base import Head
from fullrank.heads.low_rank import LowRank
from fullrank.heads.rows import RowHead
from fullrank.heads.softmax import Softmax
from fullrank.models.anatomy import norm_rank
from fullrank.models.body import Body
from fullrank.models.transformer import TransformerBody
from fullrank.text import sample
from fullrank.train.batches import evaluation_streams, evaluation_windows
from fullrank.train.folder import Run

BATCH = 4
"""Windows at once, for a body with a context."""
STRETCH = 1024
"""Tokens in a row that are taken from one place of a text: a carried state needs some to be of use."""
OUTPUT = "output"
"""The name of the rows among the layers, where they are not the last layer's states."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Text:
    """Tokens to run a model on."""

    tokens: np.ndarray
    bytes_per_token: float
    """Of the whole text in UTF-8: a part of it has as large a part of its bytes."""
    sources: tuple[str, ...]
    sha256: str
    notes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class RunStates(collect.States):
    """States of a run. The layers of one may differ in width, so they stand in `sampled`."""

    single: bool
    """Whether the head makes one row a token: then `hidden` are these rows, else the last layer's states."""
    read: tuple[Tensor, ...]
    """[N, H] each: what a head that is not single reads, the last layer first."""
    losses: Tensor
    """[N] nats, by the model itself."""
    inputs: Tensor
    """[N] the token under each state."""
    segment: int
    """Tokens that the model was given at once."""
    carries: bool
    """Whether the body carries its state from window to window."""
    sampled: tuple[Tensor, ...]
    """[n, width] of each layer in `layer_names`, at `layer_positions`."""
    final_norm: str
    """The class of the body's final norm; "" where it has none."""
    rank: int
    """The dimension that the final norm and the head's own projection leave to `hidden`."""


def from_split(run: Run, wanted: int) -> Text:
    """Tokens of the test split, in stretches from all over it."""
    split, vocabulary = run.corpus.splits["test"], run.corpus.vocabulary
    count = max(1, min(wanted, len(split.tokens)) // STRETCH)
    places = len(split.tokens) * np.arange(count) // count
    each = -(-wanted // count)
    tokens = np.concatenate([np.asarray(split.tokens[place : place + each]) for place in places])[:wanted]
    digest = hashlib.sha256(vocabulary.digest().encode())
    digest.update(tokens.astype("<u4").tobytes())
    note = (
        f"The text is {len(tokens):,} of the {len(split.tokens):,} tokens of the run's test split, from all "
        "over it; its bytes are taken as that share of the split's."
    )
    return Text(
        tokens=tokens,
        bytes_per_token=split.bytes / max(1, len(split.tokens)),
        sources=("test split of the run",),
        sha256=digest.hexdigest(),
        notes=(note, *_replaced(split.replaced, len(split.tokens), "test split")),
    )


def from_files(run: Run, files: Sequence[Path], wanted: int) -> Text:
    """Tokens from all over files, in the run's vocabulary."""
    each = 8
    while True:
        count = max(1, wanted // STRETCH)
        found = sample.draw(files, count=count, characters=min(wanted, STRETCH) * each)
        pieces = [list(run.corpus.vocabulary.stream([stretch])) for stretch in found.stretches]
        parts = [np.concatenate([piece.ids for piece in own]).astype(np.int64) for own in pieces]
        if found.whole or min(map(len, parts)) >= min(wanted, STRETCH):
            break
        each *= 2
    # Of several stretches as much of each.
    parts = [part[: -(-wanted // len(parts))] for part in parts]
    tokens = np.concatenate(parts)[:wanted]
    size = sum(len(stretch.encode("utf8", "surrogatepass")) for stretch in found.stretches)
    total = sum(len(piece.ids) for own in pieces for piece in own)
    digest = hashlib.sha256(run.corpus.vocabulary.digest().encode())
    digest.update(tokens.astype("<u4").tobytes())
    return Text(
        tokens=tokens,
        bytes_per_token=size / max(1, total),
        sources=found.sources,
        sha256=digest.hexdigest(),
        notes=_replaced(sum(piece.replaced for own in pieces for piece in own), total, "text"),
    )


def _replaced(count: int, total: int, where: str) -> tuple[str, ...]:
    if not count:
        return ()
    return (
        f"{count:,} of {total:,} tokens of the {where} stand for words outside the vocabulary: they make it "
        "easier than it was.",
    )


def windows_of(run: Run, text: Text, window: int) -> collect.Windows:
    """The inputs under the text's tokens, cut into windows: of `window` tokens, or fewer in a short text."""
    used = len(text.tokens)
    if used < collect.LEAST_TOKENS:
        raise FullrankError(
            f"the text has {used} tokens in the run's vocabulary, expected {collect.LEAST_TOKENS} or more: "
            "give a longer one with --text"
        )
    window = min(window, run.model.body.context or window)
    if used < collect.LEAST_WINDOWS * window:
        window = min(window, max(8, used // collect.SHORT_TEXT_WINDOWS))
    count = used // window
    inputs = np.concatenate([[run.corpus.vocabulary.eos], text.tokens[: count * window - 1]])
    return collect.Windows(
        ids=torch.from_numpy(inputs.astype(np.int64)).view(count, window),
        sizes=torch.full((count, window), text.bytes_per_token, dtype=torch.float64),
        sources=text.sources,
        sha256=text.sha256,
        starts_with_bos=False,
    )


@torch.no_grad()
def states_of(
    run: Run,
    text: Text,
    windows: collect.Windows,
    *,
    memory: int,
    progress: Callable[[float], None] = lambda share: None,
) -> RunStates:
    """Run the model over the windows."""
    body, head = run.model.body, run.model.head
    count, window = windows.ids.shape
    N, carries, single = count * window, body.context is None, one_row(head)
    tokens = text.tokens[:N]
    number, inside = torch.arange(N) // window, torch.arange(N) % window
    position = torch.arange(N) if carries else inside
    blocks = number * -(-window // BLOCK) + inside // BLOCK
    places = _sample(position)
    widths = [head.width] if single else list(head.state_widths)
    _check_memory(N, sum(widths), len(places) * (sum(body.widths) + 2 * head.width), memory)
    kept, losses = [torch.empty(N, width) for width in widths], torch.empty(N)
    sampled: list[list[Tensor]] = []
    done, lost = 0, ("", 0)
    for ids, targets, states in _passes(run, tokens, window):
        read, after = states[: head.states], done + ids.numel()
        own = cast(Tensor, head(read, targets, context=ids, reduction="none"))
        losses[done:after] = own.flatten().cpu()
        made = [cast(RowHead, head).rows(read)[0][..., 0, :]] if single else read
        for place, one in zip(kept, made, strict=True):
            place[done:after] = one.flatten(0, 1).cpu()
        layers = [body.embedding(ids), *reversed(states)]
        if single and made[0].data_ptr() != read[0].data_ptr():
            layers.append(made[0])
        here = (places[(places >= done) & (places < after)] - done).to(ids.device)
        sampled.append([layer.flatten(0, 1)[here].cpu() for layer in layers])
        if done == 0 and isinstance(body, TransformerBody):
            norm = body.model.final_layer_norm
            lost = norm_rank((norm, read[0]), biased=head.decoder.bias is not None)
        done = after
        progress(done / N)
    if not all(bool(torch.isfinite(one).all()) for one in kept):
        raise FullrankError(
            f"the states of {run.path} at step {run.step} hold NaN or infinity: train again, with a smaller "
            "--set optimiser.lr"
        )
    return RunStates(
        hidden=kept[0],
        targets=torch.from_numpy(tokens.astype(np.int64)),
        sizes=windows.sizes.flatten(),
        positions=position,
        blocks=blocks,
        windows=number,
        layers=torch.empty(0, 0, 0),
        layer_names=_names(body, len(sampled[0])),
        layer_positions=position[places],
        layer_blocks=blocks[places],
        single=single,
        read=() if single else tuple(kept),
        losses=losses,
        inputs=windows.ids.flatten(),
        segment=min(run.config.length, N) if carries else window,
        carries=carries,
        sampled=tuple(torch.cat(parts) for parts in zip(*sampled, strict=True)),
        final_norm=lost[0],
        rank=_rank(head, lost[1]),
    )


def one_row(head: Head) -> bool:
    """Whether the head is f(W x + b) of one row x a token. The head is asked: moc is, and mos is not."""
    if not isinstance(head, RowHead):
        return False
    device = head.decoder.weight.device
    with torch.no_grad():
        rows, _ = head.rows([torch.zeros(1, 1, width, device=device) for width in head.state_widths])
    return rows.shape[-2] == 1


def _sample(position: Tensor) -> Tensor:
    """Places for the geometry of the layers. Not first positions: these have seen one token only."""
    later = (position > 0).nonzero()[:, 0]
    generator = torch.Generator().manual_seed(0)
    return later[torch.randperm(len(later), generator=generator)[: collect.LAYER_STATES]].sort().values


def _check_memory(N: int, width: int, sampled: int, memory: int) -> None:
    needed = 4 * (N * width + sampled)
    if needed > memory:
        raise FullrankError(
            f"states of {N} tokens take {needed / 2**30:.1f} GiB, more than --memory {memory / 2**30:.1f} "
            "GiB: take fewer --tokens or allow more"
        )


def _passes(run: Run, tokens: np.ndarray, window: int) -> Iterator[tuple[Tensor, Tensor, list[Tensor]]]:
    """ids, targets [rows, time] and every layer's states, the last first; the text in order."""
    body, eos = run.model.body, run.corpus.vocabulary.eos
    device = body.embedding.weight.device
    if body.context is None:
        # Side by side, all texts but the first would begin cold.
        batches = evaluation_streams(tokens, eos, 1, run.config.length)
    else:
        batches = evaluation_windows(tokens, eos, BATCH, window, window)
    carried: tuple[Tensor, ...] = ()
    for ids, targets, _ in batches:
        ids = ids.to(device)
        output = body(ids, carried)
        carried = output.carried
        yield ids, targets.to(device), output.states


def _names(body: Body, count: int) -> tuple[str, ...]:
    names = ["embedding", *(f"layer {layer}" for layer in range(1, len(body.widths) + 1)), OUTPUT]
    return tuple(names[:count])


def _rank(head: Head, lost: int) -> int:
    """The dimension of the space of rows, where the norm takes `lost` dimensions from the states."""
    if isinstance(head, Softmax):
        return min(head.width, head.hidden - lost)
    if isinstance(head, LowRank):
        return min(head.down.out_features, head.hidden - lost)
    # Not a linear map of the states.
    return head.width
