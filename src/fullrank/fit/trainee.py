"""What may move when a head is trained on frozen states, and its loss.

Trained are the head's own parameters and W. A head without maps of its own (sigsoftmax, plif) gets a square
map M that starts at 0, z = W (x + M x) + b, and W takes it over at the end: with few tokens, directions that
all rows share are learnt long before single rows are. The controls have such a map anyway.

Which rows of W are trained, and on which loss, is in `setting`. Losses that are reported are always over the
whole vocabulary.

With a teacher the loss that trains and chooses is KL(teacher || head), which `exact_divergences` reports
beside the loss of the tokens that came.

A cache head is trained with its memory, in whole windows. With `Setting.align` HistAlign's ranking loss is
added while it trains; no loss that chooses or judges has it.

W that is fitted already wants smaller steps than what a head adds to it: where the setting names the rate
that its own fit wanted, W has that, or `MATRIX_SHARE` of the rate of the rest where this is more.

Learning rates are given as `rate`, the pace relative to the width: entries of a map from D numbers move by
rate / D a step in units that leave states and scores of any size alike, those of W in proportion to their own
size.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
from torch import Tensor, nn

from fullrank.errors import FullrankError
from fullrank.fit import captured
from fullrank.fit.sampling import Sampled
from fullrank.fit.setting import Setting
from fullrank.fit.states import Part
from fullrank.fit.teacher import Taught
from fullrank.heads import CacheHead, Head
from fullrank.heads.alignment import alignment_loss
from fullrank.heads.rows import RowHead
from fullrank.models.randomness import restored_randomness, seed_generators
from fullrank.ops import IDENTITY, Mixture, divergence, mixture_log_probs, mixture_nll
from fullrank.ops.distil import reference

MATRIX_SHARE = 0.2
"""Of the rate of the rest."""
SMALL_TABLE = 1 << 22
"""Scores that a step may hold at once on a processor."""
PIECE = 4096
"""Tokens whose losses are computed at once where nothing is learnt."""
SAMPLED_PIECE = 512
"""The same where every token has drawn rows of its own."""
LEAST_BATCH, MOST_BATCH = 256, 4096
"""Tokens a step."""
PER_PASS = 256
"""Steps that a pass over much text has, about."""


def batch_of(tokens: int) -> int:
    """Tokens a step: more where there are more, so that a pass is not many hundred steps."""
    wanted = 2 ** round(math.log2(max(1, tokens / PER_PASS)))
    return max(LEAST_BATCH, min(MOST_BATCH, wanted))


def half_products(device: torch.device) -> AbstractContextManager[Any]:
    """Products in bf16 on a GPU, where the fused loss has kernels for them: steps are noisier than rounding,
    and so are choices. What is judged is judged in fp32."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda")


class Trainee(nn.Module):
    """A copy of a head that shares W until it is trained."""

    def __init__(self, head: Head, setting: Setting, seed: int) -> None:
        super().__init__()
        weight = head.decoder.weight
        self.head = copy.deepcopy(head, {id(weight): weight})
        self.head.decoder.weight = nn.Parameter(weight.detach(), requires_grad=False)
        self.head.requires_grad_(True).train()
        self.head.decoder.weight.requires_grad_(False)
        self.setting, self.is_rows = setting, isinstance(head, RowHead)
        self.matrix: nn.Parameter | None = None
        self.bias: nn.Parameter | None = None
        self.offset: nn.Parameter | None = None
        self.map: nn.Parameter | None = None
        self.shift: nn.Parameter | None = None
        sampled, bias = setting.sampled, self.head.decoder.bias
        if sampled is not None and not self.is_rows:
            raise FullrankError(f"{head.name} is not rows over one matrix: train it with the exact loss")
        if setting.matrix:
            self.matrix = nn.Parameter(weight.detach()[self._trained].clone())
        if bias is not None:
            self.bias = nn.Parameter(bias.detach()[self._trained].clone())
            bias.requires_grad_(False)
            if self.head.pointwise is not IDENTITY:
                # Not blind to an offset of all scores, which single rows could not move.
                self.offset = nn.Parameter(weight.new_zeros(()))
        own = any(parameter.ndim > 1 for name, parameter in self.own())
        if self.is_rows and setting.matrix and not own:
            self.map = nn.Parameter(weight.new_zeros(head.width, head.width))
            self.shift = None if bias is None else nn.Parameter(weight.new_zeros(head.width))
        with restored_randomness(weight.device):
            seed_generators(seed, weight.device)
            self.head.redraw(setting.scales[0])

    @property
    def _trained(self) -> Tensor | slice:
        sampled = self.setting.sampled
        return slice(None) if sampled is None else sampled[0].rows

    def own(self) -> list[tuple[str, nn.Parameter]]:
        """The head's parameters but W and its bias."""
        return list(self.head.own_parameters())

    def trained(self) -> list[tuple[str, nn.Parameter]]:
        parts = ("matrix", "bias", "offset", "map", "shift")
        here = [(name, part) for name in parts if (part := getattr(self, name)) is not None]
        return [*self.own(), *here]

    def groups(self, rate: float) -> list[dict[str, Any]]:
        """Parameters with their learning rates."""
        known = self.setting.matrix_rate
        slow = rate if known is None else min(rate, max(known, MATRIX_SHARE * rate))
        return [
            {
                "params": [parameter],
                "lr": (slow if name in ("matrix", "bias") else rate) * self._pace(name, parameter),
            }
            for name, parameter in self.trained()
        ]

    def _pace(self, name: str, parameter: Tensor) -> float:
        width = self.head.width
        if name == "matrix":
            return 4.0 * float(parameter.detach().square().mean().sqrt()) / width
        if name == "bias":
            return 0.25
        if name == "offset":
            return 1.0
        if name == "map":
            return 1.0 / width
        if name == "shift":
            return self.setting.scales[0] / width
        return self.head.pace(name, parameter, self.setting.scales)

    def batch_losses(self, fitting: bool, chosen: Tensor, reduction: str = "none") -> Tensor:
        """Nats of the chosen tokens, or of all tokens of the chosen windows, differentiable: their loss, or
        with a teacher their divergence from it. Of a mean, gradients are made on the way."""
        part = self.setting.parts.fit if fitting else self.setting.parts.choose
        teacher, which = self.setting.teacher, 0 if fitting else 1
        if self.head.reads_time:
            with half_products(self.device):
                return self._exact(part.windows(chosen), reduction).flatten()
        states = [state.flatten(0, 1)[chosen] for state in part.states]
        if self.setting.sampled is not None:
            sampled = self.setting.sampled[which][chosen]
            taught = None if self.setting.taught is None else self.setting.taught[which][chosen]
            if fitting:
                sampled, taught = sampled.fewer(), None if taught is None else taught.fewer()
            found = self._estimated(states, sampled, taught)
            return found.mean() if reduction == "mean" else found
        if teacher is not None:
            theirs = teacher.parts.fit if fitting else teacher.parts.choose
            return self._divergences(states, teacher.at(theirs, chosen), reduction)
        targets, ids = part.targets.flatten()[chosen], part.ids.flatten()[chosen]
        with half_products(self.device):
            return self._exact_rows(states, targets, ids, reduction)

    def alignment(self, chosen: Tensor) -> Tensor | float:
        """What is added to the mean loss of the chosen windows in training: HistAlign's, where asked for."""
        if not self.setting.align or not isinstance(self.head, CacheHead):
            return 0.0
        part = self.setting.parts.fit.windows(chosen)
        found = alignment_loss(
            self.head, list(part.states[: self.head.states]), part.targets, context=part.ids
        )
        return self.setting.align * found

    # What the loop asks (`loop.Learner`).

    @property
    def device(self) -> torch.device:
        return self.setting.parts.fit.targets.device

    @property
    def examples(self) -> int:
        """Tokens, or windows for a head that reads time."""
        return self._count(self.setting.parts.fit)

    @property
    def batch(self) -> int:
        tokens = batch_of(len(self.setting.parts.fit))
        if self.head.reads_time:
            return max(1, min(tokens, LEAST_BATCH) // self.setting.parts.fit.targets.shape[1])
        return tokens

    @property
    def graph(self) -> bool:
        """Of rows and the exact loss, which are known to ask the device for nothing."""
        setting, rows = self.setting, getattr(self.head, "components", 1) * self.batch
        plain = self.is_rows and setting.sampled is None and setting.teacher is None
        work = 6 * rows * self.head.vocab * self.head.width
        return self.device.type == "cuda" and plain and not self.head.reads_time and work < captured.SMALL

    def loss(self, chosen: Tensor) -> Tensor:
        return self.batch_losses(True, chosen, "mean").mean() + self.alignment(chosen)

    @torch.no_grad()
    def choose_loss(self) -> float:
        choose = self.setting.parts.choose
        total = 0.0
        self.head.eval()
        size = PIECE if self.setting.sampled is None else SAMPLED_PIECE
        size = max(1, size // choose.targets.shape[1]) if self.head.reads_time else size
        for part in torch.arange(self._count(choose), device=choose.targets.device).split(size):
            total += float(self.batch_losses(False, part).double().sum())
        self.head.train()
        return total / len(choose)

    def _count(self, part: Part) -> int:
        return len(part.targets) if self.head.reads_time else len(part)

    def _rows(self, states: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        rows, log_prior = cast(RowHead, self.head).rows(list(states[: self.head.states]))
        if self.map is not None:
            rows = rows + rows @ self.map.T
        if self.shift is not None:
            rows = rows + self.shift
        if log_prior is None:
            log_prior = rows.new_zeros(rows.shape[:-1])
        return rows, log_prior

    def _estimated(self, states: list[Tensor], batch: Sampled, taught: Taught | None) -> Tensor:
        """[n] nats with the estimated normaliser; see `sampling`, and `teacher`."""
        rows, log_prior = self._rows(states)
        weight = self.head.decoder.weight
        scores = self._bend(rows @ self._rows_of(weight, self.matrix, batch.rows).T, batch.rows)
        drawn = torch.einsum("nkd,nmd->nkm", rows, weight[batch.drawn])
        others = self._bend(drawn, batch.drawn)
        moved = (others - batch.scores[:, None]).logsumexp(dim=-1) - math.log(batch.drawn.shape[1])
        normaliser = torch.logaddexp(scores.logsumexp(dim=-1), batch.normaliser[:, None] + moved)
        if taught is None:
            place = batch.place[:, None, None].expand(-1, rows.shape[1], 1)
            return -(log_prior + scores.gather(-1, place)[..., 0] - normaliser).logsumexp(dim=-1)
        level = (log_prior - normaliser)[..., None]
        told = self._bend(torch.einsum("nkd,nmd->nkm", rows, weight[taught.drawn]), taught.drawn)
        inside = (taught.shares * (level + scores).logsumexp(dim=1)).sum(dim=-1)
        outside = taught.rest * (level + told).logsumexp(dim=1).mean(dim=-1)
        return -taught.entropy - inside - outside

    def _rows_of(self, start: Tensor, trained: Tensor | None, ids: Tensor) -> Tensor:
        """Rows `ids` of a tensor [V, ...] of which some are trained."""
        if trained is None:
            return start[ids]
        assert self.setting.sampled is not None
        own = self.setting.sampled[0].rows
        if ids is own:
            return trained
        found = start[ids].clone()
        found[torch.searchsorted(ids, own)] = trained
        return found

    def _bend(self, scores: Tensor, ids: Tensor) -> Tensor:
        bias = self.head.decoder.bias
        if bias is not None:
            # Rows that are drawn one by one are not among the trained.
            chosen = self._rows_of(bias, self.bias, ids) if ids.ndim == 1 else bias[ids][:, None]
            scores = scores + chosen
        if self.offset is not None:
            scores = scores + self.offset
        return self.head.pointwise(scores)

    def whole_matrix(self) -> tuple[Tensor, Tensor | None]:
        """W and the bias over the whole vocabulary, without the map."""
        weight: Tensor = self.head.decoder.weight
        bias: Tensor | None = self.head.decoder.bias
        if self.setting.sampled is None:
            weight = weight if self.matrix is None else self.matrix
            bias = bias if self.bias is None else self.bias
        else:
            rows = self.setting.sampled[0].rows
            if self.matrix is not None:
                weight = weight.index_copy(0, rows, self.matrix)
            if bias is not None and self.bias is not None:
                bias = bias.index_copy(0, rows, self.bias)
        if bias is not None and self.offset is not None:
            bias = bias + self.offset
        return weight, bias

    def _exact_rows(
        self, states: list[Tensor], targets: Tensor, ids: Tensor, reduction: str = "none"
    ) -> Tensor:
        if not self.is_rows:
            return self._called(states, targets, ids, reduction)
        rows, log_prior = self._rows(states)
        weight, bias = self.whole_matrix()
        # A table that fits a processor's cache needs no chunks, and is twice as fast without.
        scores = rows[..., 0].numel() * len(weight)
        small = rows.device.type == "cpu" and scores <= min(SMALL_TABLE, self.setting.limit // 12)
        return mixture_nll(
            rows, log_prior, weight, targets, bias=bias, pointwise=self.head.pointwise, reduction=reduction,
            impl="reference" if small else "auto", workspace=None if small else self.setting.limit,
        )  # fmt: skip

    def _divergences(self, states: Sequence[Tensor], said: Mixture, reduction: str) -> Tensor:
        """Nats between what a teacher says and what the head does."""
        rows, log_prior = self._rows(states)
        weight, bias = self.whole_matrix()
        return divergence(
            rows, log_prior, weight, said, bias=bias, pointwise=self.head.pointwise, reduction=reduction,
            workspace=self.setting.limit,
        )  # fmt: skip

    def _called(self, states: Sequence[Tensor], targets: Tensor, ids: Tensor, reduction: str) -> Tensor:
        """The head's own loss, with the trained matrix in its place."""
        weight, bias = self.whole_matrix()
        given = {"decoder.weight": weight} | ({} if bias is None else {"decoder.bias": bias})
        found = torch.func.functional_call(
            self.head,
            given,
            (list(states[: self.head.states]), targets),
            {"context": ids if self.head.needs_context else None, "reduction": reduction},
        )
        return cast(Tensor, found)

    def _exact(self, part: Part, reduction: str = "none") -> Tensor:
        return self._called(part.states, part.targets, part.ids, reduction)

    @torch.no_grad()
    def exact_losses(self, part: Part) -> Tensor:
        """[tokens] nats over the whole vocabulary."""
        self.head.eval()
        if self.head.reads_time:
            size = max(1, PIECE // part.targets.shape[1])
            pieces = torch.arange(len(part.targets), device=part.targets.device).split(size)
            found = [self._exact(part.windows(piece)).flatten() for piece in pieces]
        else:
            flat = [state.flatten(0, 1) for state in part.states]
            found = [
                self._exact_rows([state[at] for state in flat], targets, ids)
                for at, targets, ids in zip(
                    torch.arange(len(part), device=part.targets.device).split(PIECE),
                    part.targets.flatten().split(PIECE),
                    part.ids.flatten().split(PIECE),
                    strict=True,
                )
            ]
        self.head.train()
        return torch.cat(found)

    @torch.no_grad()
    def exact_divergences(self) -> Tensor | None:
        """[held-out tokens] KL(teacher || head) in nats, over the whole vocabulary; None without one."""
        teacher, limit = self.setting.teacher, self.setting.limit
        if teacher is None:
            return None
        self.head.eval()
        weight, bias = self.whole_matrix()
        flat = [state.flatten(0, 1) for state in self.setting.parts.held_out.states]
        found = []
        for at, log_q in teacher.log_probs(teacher.parts.held_out, limit // 4):
            rows, log_prior = self._rows([state[at] for state in flat])
            log_p = mixture_log_probs(
                rows, log_prior, weight, bias=bias, pointwise=self.head.pointwise, workspace=limit
            )
            # Never below 0 but for rounding.
            found.append(reference.divergence(log_p, log_q, "forward").clamp_(min=0.0))
        self.head.train()
        return torch.cat(found)

    @torch.no_grad()
    def load(self, weights: Mapping[str, Tensor], *, some: bool = False) -> None:
        """Take over what `trained` names, or what of it there is."""
        for name, parameter in self.trained():
            if not some or name in weights:
                parameter.copy_(weights[name])

    @torch.no_grad()
    def into(self, head: Head) -> None:
        """Write what was learnt into a head of the same kind; a matrix that was trained becomes its own."""
        mine = dict(self.head.named_parameters())
        for name, parameter in head.named_parameters():
            if not name.startswith("decoder."):
                parameter.copy_(mine[name])
        weight, bias = self.whole_matrix()
        if head.decoder.bias is not None and bias is not None:
            moved = bias if self.shift is None else bias + weight @ self.shift
            head.decoder.bias.copy_(moved)
        if self.matrix is not None:
            folded = weight.clone() if self.map is None else weight + weight @ self.map
            old = head.decoder.weight
            head.decoder.weight = nn.Parameter(
                folded.to(old.device, old.dtype), requires_grad=old.requires_grad
            )
