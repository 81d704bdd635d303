"""K context vectors and their prior from hidden states: what every mixture is built from.

Published (Yang et al. 2018, 1711.03953):

    context_k = tanh(L_k h + l_k),       prior = softmax(G h)

Ours, the default:

    delta_k = A_k x + a_k,    prior = softmax(G h / |h|),    context_k = P h + delta_k - 1/K sum_j delta_j
    x = h where P is a map that is learned, h / sqrt(H) where P is the identity
    A_k = 0 and a_k = 0 at the start, G small and random

All components start equal, so the mixture starts as the plain head with rows P h, and its contexts' mean
stays P h for ever: what a plain head would learn is left to the body, and the head's own parameters learn
what only a mixture can say. A step of Adam moves what a map makes by more the wider its input is: differences
move as far as P h does where P is learned, and as far as one entry of h where it is not. Gates that read a
state's direction learn alike on states of any size: an LSTM's have a tenth of a normalised transformer's.
Together they let one rate serve body and head (docs/heads.md has the figures).

The plain mean and not the one under the prior: with that, equal components would have a gradient of
(posterior - prior) = 0, and nothing but rounding would ever part them. So they have (prior - 1/K), and
unequal gates part them from the first step.

`centred=False`: context_k = P h + L_k h + l_k with gates of unit size, for a body that is frozen: then the
components' common part is all that can refit the mean context. P is the identity where the widths allow it,
so a trained plain head can be taken over as it is.

`sources` lists (width of the hidden state, number of contexts made from it), the last layer first; P and G
read the last layer. Centred, the states of other layers are read at the size of the last one's, token by
token: those of a transformer are not normalised, and grow while it is trained. `private` limits what the
components own to the last `private` entries of the row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeGuard

import torch
from torch import Tensor, nn

from fullrank.errors import FullrankError
from fullrank.ops.arguments import compute_dtype

GATES = 0.1
"""Spread of the gates' logits at the start, on states of unit size: enough to tell the components apart."""


LEAST = 1e-6
"""Of a mean square."""


class LockedDropout(nn.Module):
    """Dropout of context vectors [..., K, D] whose mask stays over a sequence.

    With states [batch, time, H] one mask serves all times of a sequence; otherwise every token has its own.
    `shared` uses one mask for all K components, as DOC does; else each has its own, as MoS does. Masks m_k of
    their own are averaged inside the logarithm: to second order in p's spread, and for components that are
    equal,

        E[-log 1/K sum_k p(y | m_k)] = -log E p + Var(p) / (2 K (E p)^2)

    so that K masks leave a K-th of what one costs, which is what regularises.
    """

    def __init__(self, probability: float, *, shared: bool) -> None:
        super().__init__()
        if not 0.0 <= probability < 1.0:
            raise FullrankError(f"dropout={probability} is impossible: expected 0 <= dropout < 1")
        self.probability, self.shared = probability, shared

    def forward(self, contexts: Tensor) -> Tensor:
        if not self.training or self.probability == 0.0:
            return contexts
        *leading, K, D = contexts.shape
        if len(leading) == 2:
            leading[1] = 1
        keep = 1.0 - self.probability
        mask = contexts.new_empty(*leading, 1 if self.shared else K, D).bernoulli_(keep).div_(keep)
        return contexts * mask


class Contexts(nn.Module):
    """hidden states -> contexts [..., K, D] and log prior [..., K]."""

    def __init__(
        self,
        *,
        sources: tuple[tuple[int, int], ...],
        width: int,
        as_published: bool,
        centred: bool = False,
        private: int | None = None,
        dropout: float = 0.0,
        shared_dropout: bool = False,
    ) -> None:
        super().__init__()
        hidden = sources[0][0]
        self.width, self.as_published = width, as_published
        self.private = width if private is None else private
        self.components = sum(count for _, count in sources)
        # One component is its own mean: centred, nothing would be left of it.
        self.centred = centred and not as_published and self.components > 1
        self.counts = tuple(count for _, count in sources)
        # The part of a row that all components share: in our form the whole row as the plain head has it.
        # It is drawn first, as the plain head draws it, so that one seed gives both the same start.
        shared = width - self.private if as_published else width
        self.shared: nn.Module | None = None
        if shared:
            square = hidden == width and not as_published
            self.shared = nn.Identity() if square else nn.Linear(hidden, shared, bias=False)
        self.gate = nn.Linear(hidden, self.components, bias=False)
        self.differences = nn.ModuleList(
            nn.Linear(source, count * self.private) if count else nn.Identity() for source, count in sources
        )
        if not as_published:
            # Unequal from the first step on: equal ones would give all components one gradient for ever.
            nn.init.normal_(self.gate.weight, std=self._gate_spread)
            for difference in self.differences:
                if isinstance(difference, nn.Linear):
                    nn.init.zeros_(difference.weight)
                    nn.init.zeros_(difference.bias)
        self.dropout = LockedDropout(dropout, shared=shared_dropout)

    def forward(self, states: list[Tensor]) -> tuple[Tensor, Tensor]:
        common, owned, log_prior = self.parts(states)
        if common is not None:
            common = common[..., None, :].expand(*owned.shape[:-1], -1)
            owned = torch.cat([common, owned], dim=-1)
        return self.dropout(owned), log_prior

    @property
    def dropping(self) -> bool:
        """Whether forward is about to change what `parts` gives."""
        return self.training and self.dropout.probability > 0.0

    def parts(self, states: list[Tensor]) -> tuple[Tensor | None, Tensor, Tensor]:
        """What components share [..., D - r], what they own [..., K, r], and the log prior, before dropout.

        Nothing is shared where r is the whole width.
        """
        found = self._parts_of_few(states)
        if found is not None:
            return found
        leading = states[0].shape[:-1]
        every = [
            difference(self._read(state, states[0])).view(*leading, count, self.private)
            for state, difference, count in zip(states, self.differences, self.counts, strict=True)
            if count
        ]
        owned = every[0] if len(every) == 1 else torch.cat(every, dim=-2)
        logits = self.gate(self._read(states[0]))
        log_prior = torch.log_softmax(logits.to(compute_dtype(logits.dtype)), dim=-1)
        if self.centred:
            owned = owned - owned.mean(-2, keepdim=True)
        common, start = self._common(states[0])
        owned = torch.tanh(owned) if start is None else start[..., None, :] + owned
        return common, owned, log_prior

    def _read(self, state: Tensor, last: Tensor | None = None) -> Tensor:
        """The state as differences read it, at the size of the last layer's, or as gates do, at size one."""
        if not self.centred:
            return state
        if last is None:
            factor = state.shape[-1] ** -0.5 / _size(state)
        elif state is not last:
            factor = self._scale(state.shape[-1]) * _size(last) / _size(state)
        else:
            return state * self._scale(state.shape[-1])
        return state * factor.to(state.dtype)

    def _scale(self, width: int) -> float:
        """On states that differences read."""
        plain = self.centred and isinstance(self.shared, nn.Identity)
        return width**-0.5 if plain else 1.0

    @property
    def _gate_spread(self) -> float:
        """Of the gates' entries; not centred, for states of unit size."""
        return GATES if self.centred else self.gate.in_features**-0.5

    def _common(self, state: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """What components share [..., D - r], and in our form what their own part starts from [..., r]."""
        if self.as_published:
            return None if self.shared is None else torch.tanh(self.shared(state)), None
        assert self.shared is not None
        start = self.shared(state)
        if self.private == self.width:
            return None, start
        common, start = start.split([self.width - self.private, self.private], dim=-1)
        return common, start

    @torch.no_grad()
    def redraw(self, size: float) -> None:
        """Draw the gates anew for states of this size, while all components are equal."""
        if self.components == 1:
            # A prior over one component is 1: whatever its gate was drawn as is no part of a training.
            self.gate.weight.zero_()
            return
        maps = [part for part in self.differences if isinstance(part, nn.Linear)]
        equal = not any(bool(part.weight.any()) or bool(part.bias.any()) for part in maps)
        if equal and not self.as_published:
            self.gate.weight.normal_(std=self._gate_spread / (1.0 if self.centred else size))

    @torch.no_grad()
    def split(self, codes: Tensor, maps: Tensor, shifts: Tensor) -> None:
        """Move component k by sum_j codes[k, j] (maps[j] h + shifts[j]), [K, J], [J, r, H] and [J, r] for the
        r entries of a row that components own; the gates become even, so that codes of mean zero leave the
        mean row where it is."""
        difference = self.differences[0]
        assert isinstance(difference, nn.Linear)
        weight, bias = self.moved(codes, maps, shifts)
        difference.weight.add_(weight)
        difference.bias.add_(bias)
        self.gate.weight.zero_()

    def moved(self, codes: Tensor, maps: Tensor, shifts: Tensor) -> tuple[Tensor, Tensor]:
        """What `split` adds to the first difference's weight and bias; differentiable."""
        difference = self.differences[0]
        assert isinstance(difference, nn.Linear)
        maps, shifts = (
            torch.einsum("kj,j...->k...", codes.to(one), one).to(difference.weight) for one in (maps, shifts)
        )
        factor = 1.0 / self._scale(difference.in_features)
        return factor * maps.reshape(difference.weight.shape), shifts.reshape(difference.bias.shape)

    def pace(self, name: str, parameter: Tensor, sizes: Sequence[float]) -> float:
        """As `Head.pace`: gates move to logits of about unit size, a difference with the layer it reads."""
        if parameter.ndim < 2:
            return sizes[0] / self.width
        part, _, place = name.partition(".")
        # The sum of the sizes of what a row of the parameter reads, over that of one entry of the state.
        reads = parameter.shape[-1]
        if part == "gate":
            return reads**-0.5 if self.centred else 1.0 / (reads * sizes[0])
        if part != "differences":
            return 1.0 / reads
        # Centred ones read every layer at the size of the last.
        share = 1.0 if self.centred else sizes[0] / sizes[int(place.partition(".")[0])]
        return share / (reads * self._scale(reads))

    def _parts_of_few(self, states: list[Tensor]) -> tuple[Tensor | None, Tensor, Tensor] | None:
        """The same from one kernel, for the few tokens of a decoding step; None where that cannot serve."""
        if torch.is_grad_enabled() or torch.compiler.is_compiling() or not states[0].is_cuda:
            return None
        state, difference, gate = states[0], self.differences[0], self.gate
        if len(states) > 1 or torch.is_autocast_enabled("cuda"):
            return None
        if not (does_what_its_weights_say(difference) and does_what_its_weights_say(gate)):
            return None
        weight, bias = difference.weight, difference.bias
        if type(state) is not Tensor or any(
            type(each) is not nn.Parameter for each in (weight, bias, gate.weight)
        ):
            return None
        # Not before it is needed: Triton takes its time to load and is not everywhere.
        from fullrank.ops.decode import contexts as context_kernels

        if not context_kernels.serves(state, weight, bias, gate.weight):
            return None
        common, start = self._common(state)
        owned, log_prior = context_kernels.few_contexts(
            state,
            weight,
            bias,
            gate.weight,
            start,
            tanh=self.as_published,
            centred=self.centred,
            scale=self._scale(state.shape[-1]),
            least=LEAST,
        )
        return common, owned, log_prior


def _size(state: Tensor) -> Tensor:
    """Root mean square of a state's entries [..., 1]; zeros have a size too, for the gradient's sake."""
    return (state.to(compute_dtype(state.dtype)).square().mean(-1, keepdim=True) + LEAST).sqrt()


def does_what_its_weights_say(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether a module is a linear map and nothing else: no adapter, no hook, no call that somebody put in
    place of its own."""
    hooked = module._forward_hooks or module._forward_pre_hooks
    return type(module) is nn.Linear and not hooked and "forward" not in vars(module)
