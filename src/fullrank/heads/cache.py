"""A cache over any head: tokens that followed similar states before are likelier now.

Zhong et al. 2022 (TRIME, 2205.12674), Wan et al. 2023 (HistAlign, 2305.04782). With h_t the last layer's
state, z the base head's scores and s_ti = q_t . k_i / temperature over the remembered steps i (see `memory`):

    P(w | t)  proportional to  exp(z_tw) + sum over remembered i with x_{i+1} = w of exp(memory_weight + s_ti)
    -log P(y | t) = logaddexp(l_t, m_t) - logaddexp(l_t + log p_base(y | t), m_ty)

q and k are the state itself, as published, or with `maps` affine maps of it that start as the state. With
`cosine` both are brought to the length sqrt(H), so that s_ti is their cosine times H / temperature.
memory_weight is learned and 0 in the published form; the temperature is sqrt(H). m_t is the logsumexp of the
memory's scores, m_ty that of the steps that hold y, l_t the base head's normaliser. The loss takes log p_base
and l_t from the fused primitive and the m's from `ops.memory`, so neither N x V nor N x L exists.

What l_t is, for a base that is
    one softmax (softmax, low_rank, moc, sigsoftmax, plif)   logsumexp_v f(z_v): the published form
    a mixture of rows (mos, moss, trunk, doc)   log sum_k prior_k exp(l_k), the prior's mean of what the
                                                components have: equal components give what one of them gives
    anything else (mixtape, facets, pointer)    0: its log-probabilities are its scores
With `normalised` it is 0 for every base: then the memory is weighed against probabilities.

Memory: the causal past of the sequence; with `memory=head.remember(...)` the segments before as well; with
`head.attach(store)` the nearest entries of an external store. An empty memory leaves the base head alone.
Rank: the memory adds a term that no W h holds, so log-probabilities are of no bounded rank.
Parameters: the base's, + 1, + 2 (H^2 + H) with maps.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from fullrank.errors import FullrankError
from fullrank.heads.base import HEADS, Head, States, require_positive
from fullrank.heads.cache_scores import CacheScores
from fullrank.heads.labels import Labels, Loss
from fullrank.heads.memory import Memory, Remembered, either, entry_tokens
from fullrank.heads.pieces import CountedTokens, joined
from fullrank.heads.rows import RowHead
from fullrank.heads.start import Start
from fullrank.heads.store import Store, nearest
from fullrank.ops import Pointwise, linear_nll
from fullrank.ops.memory.chunked import memory_logsumexp
from fullrank.ops.memory.reference import View, masked_logsumexp
from fullrank.ops.reduce import Copy, capturing

SHARPNESS = 8.0
"""Score of a state against itself in the memory of a cache over a given layer, nats."""
REMEMBERED = 512
"""Steps in a memory that such a cache allows for."""
SHARE = 1e-4
"""Of probability that so many steps would have at most at its start, were they all the present state."""


class CacheHead(Head):
    name = "cache"
    needs_context: bool = True
    reads_time: bool = True

    def __init__(
        self,
        base: Head | str = "softmax",
        *,
        hidden: int | None = None,
        vocab: int | None = None,
        width: int | None = None,
        bias: bool = False,
        base_options: Mapping[str, Any] | None = None,
        temperature: float | None = None,
        memory_weight: float = 0.0,
        window: int | None = None,
        maps: bool = False,
        normalised: bool = False,
        cosine: bool = False,
    ) -> None:
        """`base` is a head, or the name of one that is built for hidden, vocab, width and bias with its own
        `base_options`. `window` is how many steps back a token sees; None: all."""
        base = _base_head(base, hidden, vocab, width, bias, base_options)
        super().__init__(hidden=base.hidden, vocab=base.vocab, width=base.width, decoder=base.decoder)
        if temperature is not None and not (math.isfinite(temperature) and temperature > 0):
            raise FullrankError(f"temperature={temperature} is impossible: expected a number above 0")
        if not math.isfinite(memory_weight):
            raise FullrankError(
                f"memory_weight={memory_weight} is impossible: expected a finite number of nats, such as 0, "
                "or -10 for hardly any memory"
            )
        if window is not None:
            require_positive(window=window)
        self.state_widths = base.state_widths
        self.fixed_vocabulary = base.fixed_vocabulary
        self.softcap = base.softcap
        self.temperature = math.sqrt(self.hidden) if temperature is None else float(temperature)
        self.window, self.normalised, self.cosine = window, normalised, cosine
        self.base = base
        self.stand_on(base)
        matrix = ("decoder.weight", "decoder.bias")
        self.precise = (
            "memory_weight", *(name if name in matrix else f"base.{name}" for name in base.precise),
        )  # fmt: skip
        self.memory_weight = nn.Parameter(torch.tensor(float(memory_weight)))
        self.query = self.key = None
        if maps:
            self.query, self.key = (nn.Linear(self.hidden, self.hidden) for _ in range(2))
            for part in (self.query, self.key):
                nn.init.eye_(part.weight)
                nn.init.zeros_(part.bias)
        self.carries_memory = not base.reads_time
        self.store: Store | None = None
        self.neighbours = 0

    @property
    def pointwise(self) -> Pointwise:
        return self.base.pointwise

    def cap_scores(self, cap: float) -> None:
        self.base.cap_scores(cap)
        self.softcap = cap

    def replace_decoder(self, decoder: nn.Linear) -> None:
        super().replace_decoder(decoder)
        self.base.vocab = self.vocab

    @classmethod
    def start_options(cls, start: Start, options: Mapping[str, Any]) -> dict[str, Any]:
        """Those of a cache that hardly changes the layer, and can learn to.

        Scores of at most about `SHARPNESS` nats, where sqrt(H) would give those of trained states a hundred;
        and the memory weighed against probabilities, since their normaliser wanders by several nats between
        tokens. `components` are the base's; without a base that has some, it is a softmax with a map of its
        own to train, as the heads that it will be held against.
        """
        made = super().start_options(start, options)
        base, below = made.get("base"), dict(made.get("base_options") or {})
        if "components" in made:
            below["components"] = made.pop("components")
        if base is None:
            base = "mos" if "components" in below else "moc"
            below.setdefault("components", 1)
        if not isinstance(base, str) or base not in HEADS or base == cls.name:
            raise FullrankError(
                f"the head under the cache is {base!r}: expected the name of another, such as softmax or mos"
            )
        below = HEADS[base].start_options(start, below)
        if below.pop("bias", False):
            made["bias"] = True
        width = start.weight.shape[1]
        # What a state scores against itself at a temperature of 1.
        itself = width if made.get("cosine") else max(width * start.size**2, 1e-6)
        return {
            "temperature": itself / SHARPNESS,
            "memory_weight": math.log(SHARE / REMEMBERED) - SHARPNESS,
            "maps": True,
            "normalised": True,
            **made,
            "base": base,
            "base_options": below,
        }

    @torch.no_grad()
    def start_from(self, start: Start) -> None:
        self.base.start_from(start)
        bias, self.softcap = self.decoder.bias, self.base.softcap
        super().start_from(dataclasses.replace(start, softcap=None, bias=bias))

    def starts_exactly(self, start: Start) -> bool:
        return False

    def redraw(self, size: float) -> None:
        self.base.redraw(size)

    def scored(self) -> int:
        """Of the base; its normaliser takes a row of each component: see `_base_loss`."""
        if isinstance(self.base, RowHead) and not self.normalised:
            return self.base.row_count * self.width * self.vocab
        return self.base.scored()

    def mapped(self) -> int:
        maps = sum(part.weight.numel() for part in (self.query, self.key) if part is not None)
        return self.base.mapped() + maps

    def attended(self, length: int) -> int:
        """The text itself, or its window, is the memory; later positions are masked."""
        seen = length if self.window is None else min(length, self.window)
        return self.hidden * seen + self.base.attended(length)

    def pace(self, name: str, parameter: Tensor, sizes: Sequence[float]) -> float:
        if name == "memory_weight":
            # In nats, and far from where it is going.
            return 16.0
        if name in ("query.weight", "key.weight"):
            return 4.0 / parameter.shape[-1]
        return self.base.pace(name.removeprefix("base."), parameter, sizes)

    def bias_for(self, frequency: Tensor, lift: float) -> Tensor:
        return self.base.bias_for(frequency, lift)

    def attach(self, store: Store | None, *, neighbours: int = 64) -> None:
        """Remember what a store holds as well: its `neighbours` nearest entries a token, exactly; None: no
        more. The store is no part of the module's weights."""
        if store is None:
            self.store, self.neighbours = None, 0
            return
        require_positive(neighbours=neighbours)
        if store.width != self.hidden:
            raise FullrankError(
                f"the store has keys of width {store.width}, expected {self.hidden}: fill it with this "
                "head's states"
            )
        self.store, self.neighbours = store, neighbours

    @torch.no_grad()
    def remember(
        self,
        hidden: States,
        *,
        context: Tensor,
        memory: Memory | None = None,
        length: int | None = None,
    ) -> Memory:
        """The memory after a segment: its last `length` positions, those before it included.

        Without a length it is the head's window, and without that everything.
        """
        states = self._checked(hidden, None, context)
        keys, ids = self._keys(states, context), self._ids(context)
        if memory is not None:
            self._check_memory(memory, keys)
            keys, ids = torch.cat([memory.keys, keys], 1), torch.cat([memory.ids, ids], 1)
        whole = Memory(keys=keys.detach(), ids=ids)
        return whole.last(self.window if length is None else length)

    def cache_only(self, hidden: States, *, context: Tensor, memory: Memory | None = None) -> Tensor:
        """Log-probabilities [..., V] of the memory alone, without the base head.

        -inf for a token that is not remembered, and for all tokens where nothing is.
        """
        states = self._checked(hidden, None, context)
        scores = self._scores(states, context, memory)
        return joined(scores.memory_log_probs, scores.pieces).view(*states[0].shape[:-1], self.vocab)

    def remembered(self, states: list[Tensor], context: Tensor, memory: Memory | None = None) -> Remembered:
        """Queries of a segment, and the entries before and in it."""
        last = _cleaned(states[0], context)
        queries = self._sized(last if self.query is None else self.query(last)).flatten(0, -3)
        keys, ids, first = self._keys(states, context), self._ids(context), 0
        asking = ids >= 0
        if memory is not None:
            self._check_memory(memory, keys)
            # A memory that outgrew the window is not copied.
            memory = memory.last(self.window)
            keys = torch.cat([memory.keys.to(keys.dtype), keys], 1)
            ids, first = torch.cat([memory.ids, ids], 1), len(memory)
        return Remembered(
            queries=queries / self.temperature,
            asking=asking,
            keys=keys,
            tokens=entry_tokens(ids),
            view=View(first, self.window),
        )

    def _log_probs(
        self, states: list[Tensor], context: Tensor | None, memory: Memory | None = None
    ) -> Tensor:
        scores = self._scores(states, cast(Tensor, context), memory)
        return joined(scores.log_probs, scores.pieces).view(*states[0].shape[:-1], self.vocab)

    def _loss(
        self, states: list[Tensor], labels: Labels, context: Tensor | None, memory: Memory | None = None
    ) -> Loss:
        ids = cast(Tensor, context)
        tokens = CountedTokens(labels, self.vocab)
        remembered = self.remembered(states, ids, memory)
        targets = labels.targets.reshape(remembered.queries.shape[:2]).long()
        agreeing, every = memory_logsumexp(
            remembered.queries,
            remembered.keys,
            remembered.tokens,
            targets.masked_fill(targets == labels.ignore_index, -1),
            first=remembered.view.first,
            window=self.window,
            asking=remembered.asking,
        )
        agreeing, every = agreeing.flatten()[tokens.index], every.flatten()[tokens.index]
        if self.store is not None:
            queries = remembered.queries.flatten(0, 1)[tokens.index]
            found, held = nearest(self.store, queries, self.neighbours)
            held = held.masked_fill(~remembered.asking.flatten()[tokens.index, None], -1)
            agreed = held == tokens.targets[:, None]
            agreeing = either(agreeing, masked_logsumexp(found, agreed))
            every = either(every, masked_logsumexp(found, held >= 0))
        weight = self.memory_weight.to(every.dtype)
        nll, normaliser = self._base_loss(states, tokens, ids)
        loss = tokens.reduce(join(nll, agreeing + weight - normaliser, every + weight - normaliser))
        if not labels.stats:
            return Loss(loss)
        scores = self._scores(states, ids, memory, tokens.index)
        return Loss(loss, tokens.statistics(scores.log_probs, scores.pieces))

    def _base_loss(self, states: list[Tensor], tokens: CountedTokens, ids: Tensor) -> tuple[Tensor, Tensor]:
        """-log p_base(y) and the normaliser l, [n] each, of the tokens that count."""
        base = self.base
        if isinstance(base, RowHead) and not self.normalised:
            rows, log_prior = base._flat_rows([state.flatten(0, -2)[tokens.index] for state in states])
            decoder = self.decoder
            nll, lse = linear_nll(
                rows.flatten(0, 1),
                decoder.weight,
                tokens.targets.repeat_interleave(rows.shape[1]),
                bias=decoder.bias,
                pointwise=base.pointwise,
            )
            if rows.shape[1] == 1:
                return nll, lse
            prior = log_prior.to(nll.dtype)
            joint = prior - nll.view(prior.shape)
            possible = ~torch.isneginf(joint)
            return -masked_logsumexp(joint, possible), torch.logsumexp(prior + lse.view(prior.shape), 1)
        if base.reads_time:
            targets = torch.zeros(ids.shape, dtype=torch.long, device=ids.device).flatten()
            targets = targets.index_copy(0, tokens.index, tokens.targets).view(ids.shape)
            every = cast(Tensor, base(states, targets, context=ids, reduction="none"))
            nll = every.flatten()[tokens.index]
        else:
            picked = [state.flatten(0, -2)[tokens.index] for state in states]
            nll = cast(Tensor, base(picked, tokens.targets, reduction="none"))
        return nll, torch.zeros_like(nll)

    def _scores(
        self, states: list[Tensor], context: Tensor, memory: Memory | None, index: Tensor | None = None
    ) -> CacheScores:
        """V-wide log-probabilities of all tokens, or of those at flat positions `index`."""
        return CacheScores(
            base=self.base,
            decoder=self.decoder,
            normalised=self.normalised,
            memory_weight=self.memory_weight,
            remembered=self.remembered(states, context, memory),
            store=self.store,
            neighbours=self.neighbours,
            states=states,
            context=context,
            index=index,
        )

    def _keys(self, states: list[Tensor], context: Tensor) -> Tensor:
        """[batch, T, D]"""
        last = _cleaned(states[0], context)
        return self._sized(last if self.key is None else self.key(last)).flatten(0, -3)

    def _sized(self, states: Tensor) -> Tensor:
        return of_one_length(states) if self.cosine else states

    @staticmethod
    def _ids(context: Tensor) -> Tensor:
        return context.long().flatten(0, -2)

    def _check_memory(self, memory: Memory, keys: Tensor) -> None:
        if memory.keys.shape[::2] != keys.shape[::2]:
            raise FullrankError(
                f"the memory has keys of shape {list(memory.keys.shape)}, expected "
                f"[{keys.shape[0]}, M, {keys.shape[2]}]: remember segments of the same sequences, in order"
            )

    def _checked(self, hidden: States, targets: Tensor | None, context: Tensor | None) -> list[Tensor]:
        states = super()._checked(hidden, targets, context)
        if context is None:
            return states
        if states[0].ndim < 3:
            raise FullrankError(
                f"cache got states of shape {list(states[0].shape)}, expected [batch, time, H] with "
                "context=input_ids [batch, time]: a token sees the memory of its own sequence alone"
            )
        if context.is_floating_point() or (
            context.numel() and not context.is_meta and not capturing(context)
            and int(Copy(context.max()).here()) >= self.vocab
        ):  # fmt: skip
            raise FullrankError(
                f"cache got context of {context.dtype} with ids up to {context.max()}, expected whole "
                f"numbers below V={self.vocab} (negative: padding); check the tokenizer against the head"
            )
        return states


def of_one_length(states: Tensor) -> Tensor:
    """States [..., H] brought to the length sqrt(H); 0 stays 0."""
    return nn.functional.normalize(states, dim=-1) * math.sqrt(states.shape[-1])


def _cleaned(states: Tensor, context: Tensor) -> Tensor:
    """0 under padding: what it holds must not reach a gradient."""
    return states.where(context[..., None] >= 0, 0.0)


def join(nll: Tensor, agreeing: Tensor, every: Tensor) -> Tensor:
    """-log P(y) from -log p_base(y) and the memory's two numbers, both less the base's normaliser.

    In this form a confident base keeps its digits, and an empty memory (-inf) leaves it as it is.
    """
    return torch.logaddexp(torch.zeros_like(every), every) - either(-nll, agreeing)


def _base_head(
    base: Head | str,
    hidden: int | None,
    vocab: int | None,
    width: int | None,
    bias: bool,
    options: Mapping[str, Any] | None,
) -> Head:
    if isinstance(base, str):
        if base == CacheHead.name:
            raise FullrankError(
                "cache got base='cache': name the head under the memory, such as softmax or mos"
            )
        # The registry lists this head too.
        from fullrank.heads.registry import build

        more: dict[str, Any] = {
            **({} if width is None else {"width": width}),
            **({"bias": True} if bias else {}),
        }
        # Refused there where they are None.
        sizes = {"hidden": cast(int, hidden), "vocab": cast(int, vocab)}
        return build(base, **sizes, **more, **(options or {}))
    if not isinstance(base, Head) or isinstance(base, CacheHead):
        raise FullrankError(f"cache got a {type(base).__name__} as base, expected a head such as Softmax")
    given = {"hidden": hidden, "vocab": vocab, "width": width}
    wrong = [name for name, value in given.items() if value not in (None, getattr(base, name))]
    wrong += [*(options or {}), *(["bias"] if bias else [])]
    if wrong:
        raise FullrankError(
            f"cache got a {base.name} head and {', '.join(wrong)} for it: build the base with them instead"
        )
    return base
