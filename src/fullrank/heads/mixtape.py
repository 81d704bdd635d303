"""Mixtape: a mixture in logit space whose weights depend on the token scored, Yang et al. 2019 (NeurIPS).

    context_k = tanh(H_k g)                                                 K contexts of width D
    gate_{x,k} = sigmoid(v_x . tanh(U_k g) + u_k . g + b_{x,k})             K - 1 gates of token x
    z_x = sum_k prior_{x,k} context_k . w_x + bias_x,     p = softmax(z)

The gates sit on the inner nodes of a binary tree with K leaves, the root first, then level by level; a leaf's
prior is the product of the gates on its path, gate to the left and 1 - gate to the right. For K = 4 that is
(s1 s2, s1 (1 - s2), (1 - s1) s3, (1 - s1) (1 - s3)). One softmax, so W is read K times but normalised once.

Gate sharing: rare tokens share the gates sigmoid(u_k . g + s_k). Their priors do not depend on x, so the rare
tail is a softmax of one mean context, which the fused primitive scores; the frequent tokens are scored in
pieces, and the two parts meet in their odds (`confident.py`). `frequent` says which tokens have gates of
their own: the first so many ids, a sequence of ids, or None for all.

Parameters, with G = gate_width and F frequent tokens: V D + K H D + (K - 1)(G H + H + F) + F G, + K - 1 for s
where F < V, + V with a bias.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fullrank.errors import FullrankError
from fullrank.heads.base import Head, require_positive
from fullrank.heads.confident import against, score_nll
from fullrank.heads.labels import Labels, Loss
from fullrank.heads.pieces import CountedTokens, checkpointed, cut, joined, piece_tokens, widened
from fullrank.heads.start import Start
from fullrank.ops import Pointwise, linear_nll
from fullrank.ops.arguments import compute_dtype
from fullrank.ops.mixture.reference import bent_scores


def fold(leaves: Tensor, gates: Tensor) -> Tensor:
    """Mix leaves [n, K, ...] by the gates [n, K - 1, ...] of the tree's inner nodes, the lowest level first.

    The priors are never formed: each level is one interpolation, and no difference of near numbers enters.
    """
    while leaves.shape[1] > 1:
        nodes = leaves.shape[1] // 2
        leaves = torch.lerp(leaves[:, 1::2], leaves[:, 0::2], gates[:, nodes - 1 : 2 * nodes - 1])
    return leaves[:, 0]


class Mixtape(Head):
    name = "mixtape"
    fixed_vocabulary: bool = True
    published: ClassVar[Mapping[str, Any] | None] = {"components": 4, "dropout": 0.29}
    """Four, as the tree of gates has it, in what was published with mixtures otherwise."""
    order: Tensor
    """[V] the frequent ids, then the rare ones."""
    place: Tensor
    """[V] where each id stands in `order`."""

    def __init__(
        self,
        *,
        hidden: int,
        vocab: int,
        components: int = 4,
        width: int | None = None,
        bias: bool = False,
        gate_width: int = 32,
        frequent: int | Sequence[int] | None = None,
    ) -> None:
        super().__init__(hidden=hidden, vocab=vocab, width=width, bias=bias)
        require_positive(components=components, gate_width=gate_width)
        if components < 2 or components & (components - 1):
            raise FullrankError(
                f"mixtape got components={components}, expected a power of two >= 2 (2, 4, 8, ...): "
                "they are the leaves of a binary tree"
            )
        ids = self._frequent_ids(frequent, vocab)
        self.components, self.gate_width, self.frequent = components, gate_width, len(ids)
        # Leading ids are slices of W; any others are gathered, through these.
        self.leading = list(ids) == list(range(len(ids)))
        rare = sorted(set(range(vocab)) - set(ids))
        self.register_buffer("order", torch.tensor([*ids, *rare]))
        self.register_buffer("place", torch.argsort(self.order))
        nodes = components - 1
        self.contexts = nn.Linear(hidden, components * self.width, bias=False)
        self.gate_features = nn.Linear(hidden, nodes * gate_width, bias=False)
        self.gate = nn.Linear(hidden, nodes, bias=False)
        self.token_gate = nn.Parameter(torch.empty(self.frequent, gate_width))
        self.token_gate_bias = nn.Parameter(torch.zeros(self.frequent, nodes))
        self.rare_gate_bias = nn.Parameter(torch.zeros(nodes)) if rare else None
        # Gate logits of about unit size on states of unit size: unequal over states and over tokens.
        nn.init.normal_(self.gate.weight, std=hidden**-0.5)
        nn.init.normal_(self.token_gate, std=gate_width**-0.5)

    def scored(self) -> int:
        """Tokens that share their gates are one softmax of the mean context, the others K scores each."""
        return self.width * (self.components * self.frequent + self.vocab - self.frequent)

    def mapped(self) -> int:
        """The vector of a frequent token is multiplied with the features of K - 1 gates; biases are added."""
        nodes = self.components - 1
        again = (nodes - 1) * self.token_gate.numel()
        return super().mapped() + again - self.token_gate_bias.numel()

    @classmethod
    def equal_size(cls, width: int) -> dict[str, int]:
        return {"width": width * 5 // 6, "components": 4}

    @classmethod
    def start_options(cls, start: Start, options: Mapping[str, Any]) -> dict[str, Any]:
        raise FullrankError(
            "mixtape squeezes its contexts by tanh, so no start of it is the original: take mos or trunk"
        )

    @staticmethod
    def _frequent_ids(frequent: int | Sequence[int] | None, vocab: int) -> list[int]:
        if frequent is None:
            return list(range(vocab))
        if isinstance(frequent, int):
            if not 1 <= frequent <= vocab:
                raise FullrankError(
                    f"mixtape got frequent={frequent}, expected 1 <= frequent <= V={vocab}: None gives every "
                    "token its own gates, and with none of them the head is moc"
                )
            return list(range(frequent))
        ids = [int(token) for token in frequent]
        if not ids or len(set(ids)) < len(ids) or min(ids) < 0 or max(ids) >= vocab:
            raise FullrankError(
                f"mixtape got {len(ids)} frequent ids, {len(set(ids))} of them distinct, expected at least "
                f"one, each once, with 0 <= id < V={vocab}"
            )
        return ids

    def _split(self, tensor: Tensor) -> tuple[Tensor, Tensor]:
        """Rows of the frequent and of the rare tokens of a tensor [V, ...]."""
        if not self.leading:
            tensor = tensor[self.order]
        return tensor[: self.frequent], tensor[self.frequent :]

    def _scores(self, states: Tensor) -> MixtapeScores:
        """All that scores tokens with states [n, H]."""
        wide = compute_dtype(states.dtype)
        contexts = torch.tanh(self.contexts(states)).unflatten(-1, (self.components, self.width))
        features = torch.tanh(self.gate_features(states)).unflatten(
            -1, (self.components - 1, self.gate_width)
        )
        shared = self.gate(states).to(wide)
        weight, rare_weight = self._split(self.decoder.weight)
        bias, rare_bias = (None, None) if self.decoder.bias is None else self._split(self.decoder.bias)
        mean = None
        if self.rare_gate_bias is not None:
            gates = torch.sigmoid(shared + self.rare_gate_bias.to(wide))
            mean = fold(contexts.to(wide), gates[:, :, None]).to(contexts.dtype)
        return MixtapeScores(
            contexts=contexts,
            features=features,
            shared=shared,
            weight=widened(weight),
            bias=bias,
            token_gate=widened(self.token_gate),
            token_gate_bias=widened(self.token_gate_bias),
            mean=mean,
            rare_weight=rare_weight,
            rare_bias=rare_bias,
            pointwise=self.pointwise,
            place=None if self.leading else self.place,
        )

    def _pieces(self, tokens: int) -> list[slice]:
        # A piece holds its K F scores about six times: in two dtypes, gated, folded, and their gradients.
        columns = 6 * self.components * self.frequent + 3 * (self.vocab - self.frequent)
        return cut(tokens, piece_tokens(self.decoder.weight.device, columns))

    def _log_probs(self, states: list[Tensor], context: Tensor | None) -> Tensor:
        flat = states[0].flatten(0, -2)
        found = joined(self._scores(flat).log_probs, self._pieces(flat.shape[0]))
        return found.view(*states[0].shape[:-1], self.vocab)

    def _loss(self, states: list[Tensor], labels: Labels, context: Tensor | None) -> Loss:
        tokens = CountedTokens(labels, self.vocab)
        scores = self._scores(states[0].flatten(0, -2)[tokens.index])
        pieces = self._pieces(len(tokens))
        place = self.place[tokens.targets]
        own = place < self.frequent

        def frequent_part(piece: slice) -> Tensor:
            found = scores.frequent(piece)
            nll = score_nll(found, torch.where(own, place, 0)[piece])
            return torch.stack([nll, torch.logsumexp(found, dim=1)], dim=1)

        nll, lse = checkpointed(frequent_part, pieces).unbind(1)
        if scores.mean is not None:
            # A frequent target has no row in the tail: any row will do there, and where() cuts its gradient.
            tail_nll, tail_lse = linear_nll(
                scores.mean,
                scores.rare_weight,
                torch.where(own, 0, place - self.frequent),
                bias=scores.rare_bias,
                pointwise=scores.pointwise,
            )
            odds = tail_lse - lse
            nll = torch.where(own, nll, tail_nll) + against(torch.where(own, odds, -odds))
        stats = tokens.statistics(scores.log_probs, pieces) if labels.stats else None
        return Loss(tokens.reduce(nll), stats)


@dataclass(frozen=True, kw_only=True)
class MixtapeScores:
    """What a batch of n tokens is scored with; the V-wide work happens a piece at a time."""

    contexts: Tensor
    """[n, K, D]"""
    features: Tensor
    """[n, K - 1, G] tanh(U_k g)"""
    shared: Tensor
    """[n, K - 1] u_k . g"""
    weight: Tensor
    """[F, D] and so on: of the frequent tokens."""
    bias: Tensor | None
    token_gate: Tensor
    token_gate_bias: Tensor
    mean: Tensor | None
    """[n, D] the one row that scores the rare tail; None where no token is rare."""
    rare_weight: Tensor
    rare_bias: Tensor | None
    pointwise: Pointwise
    place: Tensor | None
    """[V] the column of each token among the frequent, then the rare ones; None where that is its id."""

    def frequent(self, piece: slice) -> Tensor:
        """z [piece, F] of the frequent tokens."""
        contexts, features, wide = self.contexts[piece], self.features[piece], self.shared.dtype
        scores = torch.matmul(contexts, self.weight.to(contexts.dtype).t()).to(wide)
        gates = torch.matmul(features, self.token_gate.to(features.dtype).t()).to(wide)
        gates = torch.sigmoid(gates + self.shared[piece, :, None] + self.token_gate_bias.t())
        mixed = fold(scores, gates)
        return self.pointwise(mixed if self.bias is None else mixed + self.bias.to(wide))

    def log_probs(self, piece: slice) -> Tensor:
        """[piece, V], in the order of the ids."""
        scores = self.frequent(piece)
        if self.mean is not None:
            tail = bent_scores(self.mean[piece], self.rare_weight, self.rare_bias, self.pointwise)
            scores = torch.cat([scores, tail], dim=1)
        if self.place is not None:
            scores = scores[:, self.place]
        return torch.log_softmax(scores, dim=1)
