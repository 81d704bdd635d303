"""Any row head with W split over the vocabulary between processes that each have their own tokens.

    model.head = shard(model.head)          # process 0's head; each process keeps its rows of W and b
    ignored_parameters(model)               # DistributedDataParallel must leave these rows alone
    model = DistributedDataParallel(model)

The hidden states, targets and token weights of all processes are gathered (N x H numbers, cheaper than the
N x K x D of the rows), every process makes the rows of all tokens with its copy of the head's small
parameters, and `ops.vocab_parallel` does the rest. So all processes call forward and backward together, with
batches of one shape. "mean" and "sum" are over the tokens of all processes and the same everywhere; "none"
gives each process the losses of its own tokens, and forward without targets its own log-probabilities.

Gradients are those of the mean over the processes of what each calls backward on, as DistributedDataParallel
has it. The rows of W and the small parameters come out with that gradient itself, the small ones alike
everywhere, so that averaging leaves them. The states come out with the number of processes times theirs, so
that the body's gradients, each from a process's own tokens, have it as their average.

Dropout inside the head must drop the same entries everywhere: while training, rows are made with random
numbers from a seed that process 0 draws for each call, and the process's own random state is left as it was
but for that draw.

W cannot be tied to an input embedding, which every process needs whole.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as distributed
from torch import Tensor, nn
from torch.distributed import ProcessGroup, ReduceOp

from fullrank.errors import FullrankError
from fullrank.heads.base import HEADS, Head
from fullrank.heads.labels import Labels, Loss
from fullrank.heads.rows import Parts, RowHead
from fullrank.ops import Pointwise, TokenStats
from fullrank.ops import parallel as vocab_parallel
from fullrank.ops.parallel import gather, gather_shards, place, split

SHAPE_ENTRIES = 8
"""Leading axes of the states that are compared between processes."""


class _Gather(torch.autograd.Function):
    """[n, ...] of each process -> [processes * n, ...]. All processes have the gradient of all of it."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, group: ProcessGroup | None) -> Tensor:
        ctx.rank, ctx.size = place(group)
        ctx.count = own.shape[0]
        return _gathered(own, group)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None]:
        return upstream[0][ctx.rank * ctx.count :][: ctx.count] * ctx.size, None


class _Own(torch.autograd.Function):
    """[processes * n] -> this process's n. The gradient is that of the mean of what all make of theirs."""

    @staticmethod
    def forward(ctx: Any, every: Tensor, group: ProcessGroup | None) -> Tensor:
        ctx.group = group
        rank, ctx.size = place(group)
        count = every.shape[0] // ctx.size
        return every[rank * count : (rank + 1) * count].clone()

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None]:
        return _gathered(upstream[0], ctx.group) / ctx.size, None


def _gathered(own: Tensor, group: ProcessGroup | None) -> Tensor:
    return gather(own, group).flatten(0, 1)


@contextmanager
def _randomness(seed: int | None, device: torch.device) -> Iterator[None]:
    """Random numbers from a seed, on the CPU and on the device of the states."""
    if seed is None:
        yield
        return
    cuda = device.type == "cuda"
    with torch.random.fork_rng(devices=[device] if cuda else []):
        torch.default_generator.manual_seed(seed)
        if cuda:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        yield


class VocabParallelHead(Head):
    """A row head of which this process holds the vocabulary entries [start, stop). Made by `shard`.

    Its rows of W are `decoder`, the rest of the head is `inner`.
    """

    def __init__(self, inner: RowHead, group: ProcessGroup | None = None) -> None:
        rank, processes = place(group)
        start, stop = split(inner.vocab, processes)[rank]
        own = _some_rows(inner.decoder, start, stop)
        super().__init__(hidden=inner.hidden, vocab=inner.vocab, width=inner.width, decoder=own)
        self.name, self.mixture = inner.name, inner.mixture  # type: ignore[misc]
        self.state_widths = inner.state_widths
        self.group, self.rank, self.processes = group, rank, processes
        self.start, self.stop = start, stop
        self.inner = inner
        self.stand_on(inner)

    def own_rows(self, whole: Tensor) -> Tensor:
        """This process's part of [V, ...]."""
        return whole[self.start : self.stop]

    def all_rows(self, own: Tensor) -> Tensor:
        """[V, ...] on every process from each one's part: W, its bias, or an optimiser's state of them."""
        return gather_shards(own.detach(), start=self.start, group=self.group)

    @property
    def pointwise(self) -> Pointwise:
        return self.inner.pointwise

    def scored(self) -> int:
        """Of all processes together: the same as the plain head."""
        return self.inner.scored()

    def mapped(self) -> int:
        return self.inner.mapped()

    def attended(self, length: int) -> int:
        return self.inner.attended(length)

    def tie(self, embedding: nn.Embedding | nn.Parameter) -> None:
        raise FullrankError(
            "a head whose W is split over processes cannot be tied to an embedding, which every process "
            "needs whole: pass --set head.tie=false"
        )

    def _gather_rows(
        self, states: list[Tensor], targets: Tensor | None, token_weight: Tensor | None
    ) -> Parts:
        """Rows [processes * N, K, D] and log prior of the tokens of all processes."""
        seed = self._agree(states[0], targets, token_weight)
        every = [_Gather.apply(state, self.group) for state in states]
        with _randomness(seed, states[0].device):
            return self.inner.flat_parts(every)

    def _agree(self, state: Tensor, targets: Tensor | None, token_weight: Tensor | None) -> int | None:
        """Raise on every process alike where the batches differ in shape; process 0's seed while training."""
        shape = list(state.shape[:-1])
        facts = [targets is not None, token_weight is not None, len(shape), *shape[:SHAPE_ENTRIES]]
        facts += [0] * (3 + SHAPE_ENTRIES - len(facts))
        seed = int(torch.randint(1 << 62, ()).item()) if self.inner.training else -1
        own = torch.tensor([*facts, seed], device=state.device)
        every = gather(own, self.group)
        if bool((every[:, :-1] != every[0, :-1]).any()):
            shapes = [row[3 : 3 + row[2]] for row in every.tolist()]
            raise FullrankError(
                f"the processes came with batches of shapes {shapes} (with targets: "
                f"{[bool(row[0]) for row in every.tolist()]}, with token weights: "
                f"{[bool(row[1]) for row in every.tolist()]}), expected the same on all: give every process "
                "as many tokens, and fill up with targets of ignore_index"
            )
        first = int(every[0, -1])
        return None if first < 0 else first

    def _shard(self) -> dict[str, Any]:
        return {
            "start": self.start,
            "bias": self.decoder.bias,
            "pointwise": self.pointwise,
            "group": self.group,
        }

    def _loss(self, states: list[Tensor], labels: Labels, context: Tensor | None) -> Loss:
        """The log prior is that of the tokens of all processes."""
        rows, log_prior, gate = self._gather_rows(states, labels.targets, labels.token_weight)
        targets, weight = labels.targets.flatten(), labels.token_weight
        every = _gathered(targets, self.group)
        shard = self._shard()
        loss = vocab_parallel.mixture_nll(
            rows, log_prior, self.decoder.weight, every, reduction=labels.reduction,
            token_weight=None if weight is None else _gathered(weight.detach().flatten(), self.group),
            ignore_index=labels.ignore_index, **shard,
        )  # fmt: skip
        stats = None
        if labels.stats:
            known = vocab_parallel.token_stats(
                rows, log_prior, self.decoder.weight, every, ignore_index=labels.ignore_index, **shard
            )
            first = self.rank * targets.shape[0]
            stats = TokenStats(*(column[first : first + targets.shape[0]] for column in known))
        if labels.reduction == "none":
            loss = _Own.apply(loss, self.group).view(labels.targets.shape)
        return Loss(loss, stats, gate)

    @torch.no_grad()
    def _log_probs(self, states: list[Tensor], context: Tensor | None) -> Tensor:
        """Of this process's states, without gradients. All processes call together."""
        rows, log_prior, _ = self._gather_rows(states, None, None)
        by_process = (self.processes, rows.shape[0] // self.processes)
        rows, log_prior = rows.unflatten(0, by_process), log_prior.unflatten(0, by_process)
        own = rows.new_empty(0)
        # One process's tokens after another's, so that no more than N x V numbers are held for others.
        for rank in range(self.processes):
            whole = vocab_parallel.log_probs(
                rows[rank], log_prior[rank], self.decoder.weight, **self._shard()
            )
            if rank == self.rank:
                own = whole
        return own.view(*states[0].shape[:-1], self.vocab)


def _some_rows(whole: nn.Linear, start: int, stop: int) -> nn.Linear:
    own = nn.Linear(whole.in_features, stop - start, bias=whole.bias is not None, device="meta")
    for name, parameter in list(whole.named_parameters()):
        rows = parameter.detach()[start:stop].clone()
        own.register_parameter(name, nn.Parameter(rows, requires_grad=parameter.requires_grad))
    return own


def shard(head: Head, group: ProcessGroup | None = None) -> VocabParallelHead:
    """Split a head's W between the processes of a group (all of them by default), which call this together.

    The head of the group's first process is what all start from. The head is taken over: its W is replaced.
    """
    if not head.splits:
        known = sorted(name for name, one in HEADS.items() if one.splits)
        raise FullrankError(
            f"{head.name} does not go through one matrix alone, so its W cannot be split over processes: "
            f"expected one of {', '.join(known)}"
        )
    _, processes = place(group)
    split(head.vocab, processes)
    if processes > 1:
        for tensor in head.state_dict().values():
            distributed.broadcast(tensor, group=group, group_src=0)
    return VocabParallelHead(cast(RowHead, head), group)


def unshard(head: VocabParallelHead) -> RowHead:
    """The plain head with all of W, a copy on every process, without gradients."""
    decoder = head.decoder
    whole = nn.Linear(head.width, head.vocab, bias=decoder.bias is not None, device="meta")
    for name, parameter in list(decoder.named_parameters()):
        whole.register_parameter(name, nn.Parameter(head.all_rows(parameter), requires_grad=False))
    # A copy of the inner head alone, not of the one that it stands under.
    plain = copy.deepcopy(head.inner, {id(head): head}).requires_grad_(False)
    plain.decoder, plain.above = whole, ()
    return plain


def full_state(head: VocabParallelHead) -> dict[str, Tensor]:
    """The state of the plain head, W whole, on every process; all processes call together."""
    matrix = {f"decoder.{name}": head.all_rows(tensor) for name, tensor in head.decoder.state_dict().items()}
    return matrix | {name: tensor.detach().clone() for name, tensor in head.inner.state_dict().items()}


@torch.no_grad()
def load_full_state(head: VocabParallelHead, state: Mapping[str, Tensor]) -> None:
    """Take a plain head's state: each process its rows of W. Nothing changes where it does not fit."""
    own = {f"decoder.{name}": tensor for name, tensor in head.decoder.state_dict().items()}
    own |= head.inner.state_dict()
    if own.keys() != state.keys():
        raise FullrankError(
            f"the state has {sorted(state.keys() - own.keys())} too many and lacks "
            f"{sorted(own.keys() - state.keys())}: load it into a head of the same kind and options"
        )
    parts = {}
    for name, tensor in own.items():
        part = state[name]
        shape = [*tensor.shape]
        if name.startswith("decoder."):
            shape[0] = head.vocab
        if [*part.shape] != shape:
            raise FullrankError(
                f"{name} has shape {list(part.shape)} in the state, expected {shape}: "
                "load it into a head of the same sizes"
            )
        parts[name] = head.own_rows(part) if name.startswith("decoder.") else part
    for name, tensor in own.items():
        tensor.copy_(parts[name])


def _sharded(model: nn.Module) -> list[tuple[str, VocabParallelHead]]:
    return [(name, module) for name, module in model.named_modules() if isinstance(module, VocabParallelHead)]


def ignored_parameters(model: nn.Module) -> list[str]:
    """Names of the parameters that differ between processes. Also tells DistributedDataParallel, which reads
    them from the module that it is given: call this before wrapping the model."""
    heads = _sharded(model)
    if heads and getattr(model, "tied", False):
        raise FullrankError(
            "the model's head was tied to its embedding and then split over processes, which unties them: "
            "pass --set head.tie=false"
        )
    names = [
        f"{prefix}.decoder.{name}".removeprefix(".")
        for prefix, head in heads
        for name, _ in head.decoder.named_parameters()
    ]
    known = list(getattr(model, "_ddp_params_and_buffers_to_ignore", []))
    model._ddp_params_and_buffers_to_ignore = known + [name for name in names if name not in known]  # type: ignore[assignment]
    return names


@torch.no_grad()
def clip_gradients(model: nn.Module, most: float) -> Tensor:
    """Scale all gradients so that their joint norm is at most `most`; returns the norm before.

    The norm includes the rows of W on all processes. torch's own clipping uses the rows of one process, so
    the processes would scale differently and their copies of the other parameters would diverge. All
    processes call this together, whether they have gradients or not.
    """
    heads = [head for _, head in _sharded(model)]
    split_parameters = {parameter for head in heads for parameter in head.decoder.parameters()}
    gradients = [
        (parameter, parameter.grad) for parameter in model.parameters() if parameter.grad is not None
    ]
    if not gradients and not heads:
        return torch.zeros(())
    # Of one dtype on all processes: a process without gradients takes part in the sum.
    like = heads[0].decoder.weight if heads else gradients[0][1]
    wide = torch.promote_types(like.dtype, torch.float32)

    def squared(split: bool) -> Tensor:
        norms = [
            torch.linalg.vector_norm(gradient, dtype=wide)
            for parameter, gradient in gradients
            if (parameter in split_parameters) is split
        ]
        return torch.stack(norms).square().sum() if norms else like.new_zeros((), dtype=wide)

    total = squared(True)
    if heads and heads[0].processes > 1:
        distributed.all_reduce(total, ReduceOp.SUM, group=heads[0].group)
    norm = (total + squared(False)).sqrt()
    factor = (most / (norm + 1e-6)).clamp(max=1.0)
    for _, gradient in gradients:
        gradient.mul_(factor.to(gradient.device))
    return norm
