"""The contract of a head: hidden states in, normalised log-probabilities or a loss out.

    head(hidden)            [..., V] log-probabilities, fp32, normalised: log_softmax leaves them as they are
    head(hidden, targets)   the loss in nats, without an N x V tensor

`hidden` is [..., H], or for a head that reads several layers (`head.states` > 1) a sequence of as many
tensors with the same leading shape, the last layer first. Call a head through forward only, so that sharded
and adapted weights are in place. Nearly every head is a `RowHead` (`rows.py`).

A head describes itself; nobody else keeps a list of heads. A class with a `name` of its own is known by it
(`HEADS`), and answers what the rest of the house asks, with defaults that serve most:

    options                 its options and their defaults
    options_for             those for a body of given widths and the settings of a training run
    equal_size, published   settings for recipes: at softmax's number of parameters, and as published
    start_options, start_from, starts_exactly       how it starts as a given output layer: see `start.py`
    redraw, pace, precise   what a training from there draws anew, how far it steps, what stays in fp32
    mixture                 whether forward hands out a log prior over components, for a balance penalty
    splits                  whether W can be split over processes: see `vocab_parallel.py`
    worth_trying            whether a search for a better head should try it
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from fullrank.errors import FullrankError
from fullrank.heads.labels import Labels, Loss
from fullrank.heads.start import Start
from fullrank.ops import IDENTITY, Pointwise, Softcap, TokenStats
from fullrank.ops.arguments import check_reduction

States = Tensor | Sequence[Tensor]

HEADS: dict[str, type[Head]] = {}
"""Every head that has been defined, by its name."""

GIVEN = ("hidden", "vocab", "width", "bias")
"""Options that an output layer to start from decides."""


_EMPTY: ContextVar[bool] = ContextVar("_EMPTY", default=False)


@contextmanager
def without_matrix() -> Iterator[None]:
    """Heads built inside have a W without memory and draw no numbers for it: for the use of their rows with
    another matrix."""
    before = _EMPTY.set(True)
    try:
        yield
    finally:
        _EMPTY.reset(before)


def require_positive(**sizes: int) -> None:
    for name, size in sizes.items():
        if not isinstance(size, int) or size < 1:
            raise FullrankError(f"{name}={size!r} is impossible: expected a whole number >= 1")


class Head(nn.Module, ABC):
    """A map from hidden states to a distribution over V tokens through one matrix W [V, D]."""

    name: str
    """Given in the class body it is what the head is built by."""
    needs_context: bool = False
    """Whether forward needs the ids that the states were computed from (a pointer does)."""
    reads_time: bool = False
    """Whether a token's distribution depends on the states of earlier tokens as well, so that forward must be
    given them all."""
    carries_memory: bool = False
    """Whether forward takes `memory` in place of the states of earlier tokens (a cache does)."""
    fixed_vocabulary: bool = False
    """Whether the head has parameters for single tokens beside W and its bias."""
    softcap: float | None = None
    """Where set, the scores z are bent to c tanh(z / c); see `cap_scores`."""
    precise: tuple[str, ...] = ()
    """Parameters that stay in fp32 when the rest is rounded."""

    mixture: ClassVar[bool] = False
    """Whether it has a log prior over components that depends on the token, which `return_prior` gives."""
    splits: ClassVar[bool] = False
    """Whether it goes through W alone, so that W can be split over the vocabulary between processes."""
    worth_trying: ClassVar[bool] = False
    """Whether it can gain over softmax at about the cost of one: what `--head auto` and question 6 try."""
    offsets: ClassVar[tuple[float, ...]] = ()
    """Where its function is not blind to an offset of all scores: offsets worth starting from, of which the
    last makes it softmax."""
    row_map: ClassVar[str] = ""
    """The parameter that maps a state to the row that a plain head would score, where it has one."""
    published: ClassVar[Mapping[str, Any] | None] = None
    """Settings that were published with the AWD-LSTM of mixtures on Penn Treebank and WikiText-2."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        name = vars(cls).get("name")
        if not isinstance(name, str):
            return
        known = HEADS.get(name)
        # The same class defined again, as in a notebook, takes its own place.
        if known is not None and (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
            raise FullrankError(
                f"{cls.__qualname__} has the name {name!r}, which is that of {known.__module__}."
                f"{known.__qualname__} already: give it another"
            )
        HEADS[name] = cls

    def __init__(
        self,
        *,
        hidden: int,
        vocab: int,
        width: int | None = None,
        bias: bool = False,
        decoder: nn.Linear | None = None,
    ) -> None:
        """`decoder` is a matrix to take in place of a fresh one, with a bias or without."""
        super().__init__()
        width = hidden if width is None else width
        require_positive(hidden=hidden, vocab=vocab, width=width)
        self.hidden, self.vocab, self.width = hidden, vocab, width
        self.state_widths: tuple[int, ...] = (hidden,)
        """Width of each state that forward expects, the last layer first."""
        self.above: tuple[Head, ...] = ()
        """The head that stands on this one and holds W, where there is one; a tuple, so that it is no part of
        this module."""
        if decoder is not None:
            self.decoder = decoder
            return
        self.decoder = nn.Linear(width, vocab, bias=bias, device="meta" if _EMPTY.get() else None)
        nn.init.normal_(self.decoder.weight, std=0.02)
        if bias:
            nn.init.zeros_(self.decoder.bias)

    @property
    def decoder(self) -> nn.Linear:
        """W and its bias; those of the head above where this one stands under another."""
        own = self._modules.get("decoder")
        if own is None and self.above:
            return self.above[0].decoder
        return cast(nn.Linear, own)

    @decoder.setter
    def decoder(self, decoder: nn.Linear) -> None:
        # For type checkers: torch registers modules before it asks for a property.
        super().__setattr__("decoder", decoder)

    def stand_on(self, below: Head) -> None:
        """Let the head below use the W of this one, whoever puts what there: one matrix under one name."""
        below.register_module("decoder", None)
        below.above = (self,)

    @property
    def states(self) -> int:
        return len(self.state_widths)

    @property
    def pointwise(self) -> Pointwise:
        """The function that bends the scores; override it for one of the head's own."""
        return IDENTITY if self.softcap is None else Softcap(self.softcap)

    @property
    def one_matrix(self) -> bool:
        """Whether the distribution is softmax(W h + b) of the last layer's state h itself."""
        return False

    def cap_scores(self, cap: float) -> None:
        """Bend every score by cap * tanh(score / cap), as some models do with their logits."""
        if type(self).pointwise is not Head.pointwise:
            raise FullrankError(
                f"{self.name} bends its scores already and cannot cap them at {cap}: take a head that leaves "
                "them straight, such as softmax or mos"
            )
        Softcap(cap)  # refuses what is no cap
        self.softcap = cap

    def replace_decoder(self, decoder: nn.Linear) -> None:
        """Take another matrix of the same width, for as many tokens as it has rows."""
        rows, width = decoder.weight.shape
        if width != self.width or (self.fixed_vocabulary and rows != self.vocab):
            raise FullrankError(
                f"a matrix of shape {[rows, width]} cannot replace W of shape {[self.vocab, self.width]} in "
                f"{self.name}: build the head anew for it"
            )
        self.decoder, self.vocab = decoder, rows

    def tie(self, embedding: nn.Embedding | nn.Parameter) -> None:
        """Share W with an input embedding of the same shape."""
        weight = embedding.weight if isinstance(embedding, nn.Embedding) else embedding
        if weight.shape != self.decoder.weight.shape:
            raise FullrankError(
                f"an embedding of shape {list(weight.shape)} cannot be tied to W of shape "
                f"{list(self.decoder.weight.shape)}: build the head with width={weight.shape[-1]} and "
                f"vocab={weight.shape[0]}"
            )
        self.decoder.weight = cast(nn.Parameter, weight)

    def own_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """What the head has besides W and its bias, by name: gates, contexts, projections."""
        matrix = set(self.decoder.parameters())
        return (item for item in self.named_parameters() if item[1] not in matrix)

    def scored(self) -> int:
        """Multiplications of a token's scores: the width of what W is multiplied with, times V."""
        return self.width * self.vocab

    def mapped(self) -> int:
        """Multiplications of a token in the head's own maps."""
        return sum(parameter.numel() for _, parameter in self.own_parameters() if parameter.ndim > 1)

    def attended(self, length: int) -> int:
        """Multiplications of a token with the other positions of a text of this length."""
        return 0

    def flops(self, length: int = 0) -> int:
        """Floating-point operations of a token in training: forward, and twice that backward.

        `length` is that of the texts, for a head that scores earlier positions. What a loss computes twice to
        save memory is counted once.
        """
        return 6 * (self.scored() + self.mapped() + self.attended(length))

    # What others ask of a class.

    @classmethod
    def options(cls) -> dict[str, Any]:
        """Its options and their defaults; `inspect.Parameter.empty` where one has to be given."""
        known = inspect.signature(cls).parameters
        return {
            name: one.default for name, one in known.items() if name not in ("hidden", "vocab", "decoder")
        }

    @classmethod
    def options_for(cls, settings: Mapping[str, Any], widths: Sequence[int]) -> dict[str, Any]:
        """Options for a body whose states have these widths, the last layer first.

        `settings` are those of any head in a training run; what it has no option for is not for it.
        """
        known = cls.options()
        return {name: value for name, value in settings.items() if name in known}

    @classmethod
    def equal_size(cls, width: int) -> dict[str, int]:
        """Settings that give it nearly as many parameters as a softmax of this width has, where the
        vocabulary is some fifty times the state: a mixture's projections are parameters too."""
        return {"width": width}

    # How it starts as a given output layer.

    @classmethod
    def start_options(cls, start: Start, options: Mapping[str, Any]) -> dict[str, Any]:
        """What to build it with so that it can start as that layer, the caller's `options` among it. Raises
        where none will do."""
        given = sorted(set(options) & set(GIVEN))
        if given:
            raise FullrankError(
                f"{', '.join(given)} cannot be chosen in an upgrade: the original's output layer decides that"
            )
        made = {**({} if start.bias is None else {"bias": True}), **options}
        if "components" in cls.options():
            # Whoever reads the configuration should not have to know it.
            made.setdefault("components", cls.options()["components"])
        return made

    @torch.no_grad()
    def start_from(self, start: Start) -> None:
        """Take W, b and the cap of that layer, its device and dtype. Override it for what the head owns
        beyond them, where that would change something as it is drawn."""
        # Before anything is moved: a head built without a matrix has none to move.
        self.decoder.weight = start.weight
        if start.bias is not None:
            bias = start.bias
            self.decoder.bias = bias if isinstance(bias, nn.Parameter) else nn.Parameter(bias)
        elif self.decoder.bias is not None and self.decoder.bias.is_meta:
            self.decoder.bias = nn.Parameter(start.weight.new_zeros(self.vocab))
        if start.softcap is not None:
            self.cap_scores(start.softcap)
        self.to(device=start.weight.device)
        for name, parameter in self.named_parameters():
            if name not in self.precise:
                parameter.data = parameter.data.to(start.weight.dtype)

    def starts_exactly(self, start: Start) -> bool:
        """Whether it is that layer after `start_from` but for rounding; False: nearly."""
        return True

    def redraw(self, size: float) -> None:
        """Draw anew, for states of this root mean square, what may be anything while it changes nothing."""

    def pace(self, name: str, parameter: Tensor, sizes: Sequence[float]) -> float:
        """How far training from a given layer moves an entry of one of its own parameters, in rates: so that
        scores move alike whatever the width and the root mean squares `sizes` of the states it reads."""
        return sizes[0] / self.width if parameter.ndim < 2 else 1.0 / parameter.shape[-1]

    def bias_for(self, frequency: Tensor, lift: float) -> Tensor:
        """The bias that gives every token its frequency [V] where rows are 0. `lift` moves the scores all
        together, for a function that is not blind to that."""
        return frequency.log()

    # What it does.

    def forward(
        self,
        hidden: States,
        targets: Tensor | None = None,
        *,
        context: Tensor | None = None,
        reduction: str = "mean",
        token_weight: Tensor | None = None,
        ignore_index: int = -100,
        return_stats: bool = False,
        return_prior: bool = False,
        return_normaliser: bool = False,
        **more: Any,
    ) -> Tensor | tuple[Any, ...]:
        """Log-probabilities [..., V] without targets; with targets [...] the loss, as `mixture_nll` has it.

        `context` [...] are the input ids under the states, for a head with `needs_context`; others ignore it.
        With `return_stats` a tuple of the loss and `TokenStats`; with `return_prior` the log prior
        [tokens, K] of a mixture comes next; with `return_normaliser` the mean of Σ_k prior_k l_k² over tokens
        comes last, l_k the logsumexp of component k's scores: what z-loss holds down. `more` is for a head
        that takes more, as a cache does memory.
        """
        states = self._checked(hidden, targets, context)
        if targets is None:
            return self._log_probs(states, context, **more)
        # Before anything is flattened: [time, batch] weights would fit [batch, time] targets by number.
        check_reduction(targets, reduction, token_weight)
        labels = Labels(
            targets=targets,
            reduction=reduction,
            token_weight=token_weight,
            ignore_index=ignore_index,
            stats=return_stats,
            normaliser=return_normaliser,
        )
        loss = self._loss(states, labels, context, **more)
        found: list[Any] = [loss.value]
        if loss.stats is not None:
            found.append(TokenStats(*(column.view(targets.shape) for column in loss.stats)))
        if return_prior:
            found.append(loss.log_prior)
        if return_normaliser:
            if loss.normaliser is None:
                raise FullrankError(
                    f"{self.name} does not give its normalisers: z-loss is for heads that are rows over one "
                    "whole matrix"
                )
            found.append(loss.normaliser)
        return found[0] if len(found) == 1 else tuple(found)

    @abstractmethod
    def _log_probs(self, states: list[Tensor], context: Tensor | None) -> Tensor:
        """Normalised log-probabilities [..., V]."""

    @abstractmethod
    def _loss(self, states: list[Tensor], labels: Labels, context: Tensor | None) -> Loss:
        """The loss, flat statistics if asked, and the log prior of a mixture."""

    @torch.no_grad()
    def sample(
        self, hidden: States, *, context: Tensor | None = None, generator: torch.Generator | None = None
    ) -> Tensor:
        """One exact draw a token at temperature 1, [...]."""
        states = self._checked(hidden, None, context)
        log_probs = self._log_probs(states, context)
        flat = torch.multinomial(log_probs.flatten(0, -2).exp(), 1, generator=generator)
        return flat.view(log_probs.shape[:-1])

    @torch.no_grad()
    def top(self, hidden: States, m: int, *, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The m most probable tokens of the whole distribution: log-probabilities and ids, [..., m] each."""
        states = self._checked(hidden, None, context)
        self._check_top(m)
        return torch.topk(self._log_probs(states, context), m, dim=-1)

    def _check_top(self, m: int) -> None:
        if not isinstance(m, int) or not 1 <= m <= self.vocab:
            raise FullrankError(f"top got m={m!r}, expected a whole number with 1 <= m <= V={self.vocab}")

    def _checked(self, hidden: States, targets: Tensor | None, context: Tensor | None) -> list[Tensor]:
        states = [hidden] if isinstance(hidden, Tensor) else list(hidden)
        if len(states) != self.states:
            raise FullrankError(
                f"{self.name} got {len(states)} hidden states, expected {self.states} with widths "
                f"{list(self.state_widths)}, the last layer first"
            )
        for state, width in zip(states, self.state_widths, strict=True):
            if state.ndim < 2 or state.shape[-1] != width or state.shape[:-1] != states[0].shape[:-1]:
                raise FullrankError(
                    f"{self.name} got hidden states of shapes {[list(item.shape) for item in states]}, "
                    f"expected [..., width] with one leading shape and widths {list(self.state_widths)}"
                )
        shape = states[0].shape[:-1]
        for label, ids in (("targets", targets), ("context", context)):
            if ids is not None and ids.shape != shape:
                raise FullrankError(
                    f"{label} have shape {list(ids.shape)}, expected {list(shape)}, one a hidden state"
                )
        if self.needs_context and context is None:
            raise FullrankError(
                f"{self.name} points at earlier tokens: pass context=input_ids, {list(shape)}"
            )
        return states
