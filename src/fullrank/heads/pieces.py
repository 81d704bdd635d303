"""Losses in pieces of tokens, for heads whose scores the fused primitive cannot make.

A head here gives a function of a slice of its tokens. In a loss each piece runs under checkpoint: its V-wide
scores live while it runs, forward and once more backward, and what stays is a few numbers a token. The
gradient is autograd's own, exact; the price over the fused primitive is one more product, and W's gradient
added up piece by piece, which `widened` keeps in fp32.

`CountedTokens` holds what `ops.mixture_nll` says of targets, weights and reductions, for a loss made
elsewhere: ignored tokens are left out before any product, and a mean over nothing is 0 with gradient 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fullrank.errors import FullrankError
from fullrank.heads.labels import Labels
from fullrank.ops import TokenStats
from fullrank.ops.arguments import compute_dtype
from fullrank.ops.reduce import count_targets, reduce_losses
from fullrank.ops.workspace import default_workspace

Scorer = Callable[[slice], Tensor]

# Beyond this many rows the products gain nothing.
MOST_TOKENS = 1024


def piece_tokens(device: torch.device, columns: int) -> int:
    """Tokens in a piece whose every token needs `columns` numbers of four bytes at the worst moment."""
    return max(1, min(MOST_TOKENS, default_workspace(device) // (4 * columns)))


def cut(tokens: int, size: int) -> list[slice]:
    """Slices of at most `size` tokens; of no tokens one empty slice, so that a loss stays in the graph."""
    return [slice(start, min(start + size, tokens)) for start in range(0, max(tokens, 1), size)]


def widened(parameter: Tensor) -> Tensor:
    """The parameter in fp32 or wider: pieces cast it down, and here their gradients add up unrounded."""
    return parameter.to(compute_dtype(parameter.dtype))


def checkpointed(score: Scorer, pieces: Sequence[slice]) -> Tensor:
    """What `score` makes of all pieces, joined; nothing inside a piece outlives it."""
    if not torch.is_grad_enabled():
        return torch.cat([score(piece) for piece in pieces])
    return torch.cat(
        [checkpoint(score, piece, use_reentrant=False, preserve_rng_state=False) for piece in pieces]
    )


def joined(log_probs: Scorer, pieces: Sequence[slice]) -> Tensor:
    """Log-probabilities [N, V] of all pieces; without gradients they are written into one tensor."""
    first = log_probs(pieces[0])
    if len(pieces) == 1:
        return first
    if torch.is_grad_enabled():
        return torch.cat([first, *(log_probs(piece) for piece in pieces[1:])])
    out = first.new_empty(pieces[-1].stop, first.shape[1])
    out[pieces[0]] = first
    for piece in pieces[1:]:
        out[piece] = log_probs(piece)
    return out


class CountedTokens:
    """The tokens of a loss that count, in order: `index` [n] into the flat tokens, `targets` [n]."""

    def __init__(self, labels: Labels, vocab: int) -> None:
        targets, weight = labels.targets, labels.token_weight
        if targets.dtype not in (torch.int32, torch.int64):
            raise FullrankError(f"targets are {targets.dtype}, expected int64 or int32 token ids")
        flat = targets.flatten().long()
        self.found = count_targets(flat, vocab, labels.ignore_index)
        self.shape, self.reduction = targets.shape, labels.reduction
        index = self.found.positions
        self.index = torch.arange(flat.shape[0], device=flat.device) if index is None else index
        self.targets = self.found.targets[self.index]
        self.share = None if weight is None else weight.flatten()[self.index]
        if self.found.ignored is not None:
            # A graph is captured: all are here, and those to ignore weigh nothing.
            share = torch.ones_like(flat, dtype=torch.float32) if self.share is None else self.share
            self.share = share.masked_fill(self.found.ignored, 0.0)

    def __len__(self) -> int:
        return self.index.shape[0]

    def reduce(self, nll: Tensor) -> Tensor:
        """The loss of nll [n]: a scalar, or for "none" one a token in the targets' shape."""
        loss = self.found.nan_if_wrong(reduce_losses(nll, self.share, self.reduction))
        if self.reduction != "none":
            return loss
        return nll.new_zeros(self.shape.numel()).index_copy(0, self.index, loss).view(self.shape)

    @torch.no_grad()
    def statistics(self, log_probs: Scorer, pieces: Sequence[slice]) -> TokenStats:
        """Flat statistics of all tokens from log-probabilities [n, V], which are held a piece at a time."""
        tokens, device = self.shape.numel(), self.index.device
        nll, entropy = torch.zeros(tokens, device=device), torch.zeros(tokens, device=device)
        argmax = torch.full((tokens,), -1, device=device)
        for piece in pieces:
            found, where = log_probs(piece), self.index[piece]
            # fp64 heads report in fp64.
            nll, entropy = nll.to(found.dtype), entropy.to(found.dtype)
            nll[where] = -found.gather(1, self.targets[piece, None])[:, 0]
            argmax[where] = found.argmax(1)
            entropy[where] = torch.special.entr(found.exp()).sum(1)
        blank = self.found.blank
        return TokenStats(blank(nll, 0.0), blank(argmax, -1), blank(entropy, 0.0))
