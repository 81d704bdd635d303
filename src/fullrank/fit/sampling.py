"""Fit an output layer on frozen states: few tokens, minutes on a processor, judged exactly.

A head is contexts (rows and a log prior from a state), the matrix W and a pointwise function; it starts as
the model's own output layer. Training all V rows on some thousand tokens would cost much and teach nothing to
rows whose token never comes up. So the rows S that are trained are the tokens that occur, and those with the
largest share of the model's probability; the others stay as they are, and their part of the normaliser is
estimated by importance sampling. For each token, m other rows are drawn from the start's own distribution q,

    Σ_{v not in S} exp f(z_v)  ≈  exp(l_q) · mean_v exp( f(z_v) - q_v ),    l_q = logsumexp_{v not in S} q_v

with q_v the start's score: unbiased, and exact as long as the head has not moved. Held-out losses are
computed over the whole vocabulary: what this costs a fit it costs every head alike, and none is flattered.

States are scaled to unit size first (W takes the factor), and learning rates are given as `rate`, the pace
relative to the width: entries of a D x D map move by rate / D a step, those of W in proportion to their size.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from fullrank.errors import FullrankError
from fullrank.models.output_layer import CHUNK_BYTES, OutputLayer
from fullrank.ops import Pointwise, mixture_nll

ROWS = 1536
"""Rows of W that are trained, more if the text has more distinct tokens."""
DRAWN = 16
"""Rows drawn a token for the rest of the normaliser; four times as many where losses are compared."""
BATCH = 256
RATES = (0.03, 0.12)
EPOCHS = 3


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Tokens:
    """States [N, D], the tokens that follow [N], and their blocks of text [N]."""

    hidden: Tensor
    targets: Tensor
    blocks: Tensor

    def __len__(self) -> int:
        return len(self.targets)

    def first(self, count: int) -> Tokens:
        return Tokens(hidden=self.hidden[:count], targets=self.targets[:count], blocks=self.blocks[:count])


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Split:
    """Text in three parts: to fit on, to choose learning rates and the stopping point on, and to judge on."""

    fit: Tokens
    choose: Tokens
    held_out: Tokens


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Sampled:
    """Tokens with what the estimated normaliser needs; `rows` are the ids that scores are computed for."""

    tokens: Tokens
    rows: Tensor
    place: Tensor
    """[N] where each target stands in `rows`."""
    drawn: Tensor
    """[N, m] ids drawn from the start's distribution over the other rows."""
    scores: Tensor
    """[N, m] their scores at the start."""
    normaliser: Tensor
    """[N] logsumexp of the start's scores over the other rows."""

    def __getitem__(self, chosen: Tensor) -> Sampled:
        part = Tokens(
            hidden=self.tokens.hidden[chosen],
            targets=self.tokens.targets[chosen],
            blocks=self.tokens.blocks[chosen],
        )
        return Sampled(
            tokens=part, rows=self.rows, place=self.place[chosen], drawn=self.drawn[chosen],
            scores=self.scores[chosen], normaliser=self.normaliser[chosen],
        )  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Setting:
    """One start and one text, ready to fit any number of heads on."""

    output: OutputLayer
    """Of the scaled states."""
    split: Split
    """With scaled states."""
    fit: Sampled
    choose: Sampled
    limit: int

    @property
    def trained_rows(self) -> Tensor:
        return self.fit.rows


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Fitted:
    """A head after its fit."""

    losses: Tensor
    """[held-out tokens] nats, over the whole vocabulary."""
    choose_loss: float
    """Nats per token on the tokens set aside for choosing, with the estimated normaliser."""
    rate: float
    steps: int
    parameters: int


class Frozen(nn.Module):
    """Contexts over a matrix of which the chosen rows are trained."""

    def __init__(
        self,
        output: OutputLayer,
        rows: Tensor,
        contexts: nn.Module,
        pointwise: Pointwise,
        offset: float | None,
    ) -> None:
        super().__init__()
        self.output, self.rows, self.contexts, self.pointwise = output, rows, contexts, pointwise
        self.matrix = nn.Parameter(output.weight[rows].clone())
        # Added to every score: sigsoftmax is not blind to it, and far above zero it is softmax.
        self.offset = None if offset is None else nn.Parameter(output.weight.new_tensor(offset))

    def losses(self, batch: Sampled) -> Tensor:
        """[n] nats with the estimated normaliser, differentiable."""
        contexts, log_prior = self.contexts([batch.tokens.hidden])
        rows = self._rows_of(batch.rows)
        scores = self._bend(contexts @ rows.T, batch.rows)
        drawn = torch.einsum("nkd,nmd->nkm", contexts, self.output.weight[batch.drawn])
        others = self._bend(drawn, batch.drawn)
        moved = (others - batch.scores[:, None]).logsumexp(dim=-1) - math.log(batch.drawn.shape[1])
        normaliser = torch.logaddexp(scores.logsumexp(dim=-1), batch.normaliser[:, None] + moved)
        place = batch.place[:, None, None].expand(-1, contexts.shape[1], 1)
        return -(log_prior + scores.gather(-1, place)[..., 0] - normaliser).logsumexp(dim=-1)

    @torch.no_grad()
    def exact_losses(self, tokens: Tokens, limit: int) -> Tensor:
        """[N] nats over the whole vocabulary."""
        weight = self.output.weight.clone()
        weight[self.rows] = self.matrix
        bias = self.output.bias
        if self.offset is not None:
            bias = self.offset.expand(len(weight)) if bias is None else bias + self.offset
        found = []
        for hidden, targets in zip(tokens.hidden.split(512), tokens.targets.split(512), strict=True):
            contexts, log_prior = self.contexts([hidden])
            found.append(
                mixture_nll(
                    contexts, log_prior, weight, targets, bias=bias, pointwise=self.pointwise,
                    reduction="none", workspace=limit,
                )
            )  # fmt: skip
        return torch.cat(found)

    def _rows_of(self, ids: Tensor) -> Tensor:
        if ids is self.rows:
            return self.matrix
        weight = self.output.weight[ids]
        weight[torch.searchsorted(ids, self.rows)] = self.matrix
        return weight

    def _bend(self, scores: Tensor, ids: Tensor) -> Tensor:
        if self.output.bias is not None:
            bias = self.output.bias[ids]
            scores = scores + (bias if ids.ndim == 1 else bias[:, None])
        if self.offset is not None:
            scores = scores + self.offset
        return self.pointwise(scores)

    def groups(self, rate: float, width: int) -> list[dict[str, object]]:
        """Parameters with their learning rates; `width` is that of the states."""
        size = float(self.matrix.detach().square().mean().sqrt())
        groups: list[dict[str, object]] = [
            {"params": [self.matrix], "lr": 4.0 * size * rate / self.output.width},
            {"params": list(self.contexts.parameters()), "lr": rate / width},
        ]
        if self.offset is not None:
            groups.append({"params": [self.offset], "lr": rate})
        return [group for group in groups if group["params"]]


def setting(
    output: OutputLayer, split: Split, *, rows: int = ROWS, limit: int = CHUNK_BYTES, seed: int = 0
) -> Setting:
    """Scale the states, choose the rows to train, and draw the others."""
    scale = float(split.fit.hidden.double().square().mean().sqrt())
    if not scale > 0:
        raise FullrankError("all states are zero: the model's last layer gives nothing to fit a head on")
    scaled = OutputLayer(
        weight=output.weight * scale, bias=output.bias, pointwise=output.pointwise, tokens=output.tokens
    )
    parts = [
        Tokens(hidden=part.hidden / scale, targets=part.targets, blocks=part.blocks)
        for part in (split.fit, split.choose, split.held_out)
    ]
    ready = Split(fit=parts[0], choose=parts[1], held_out=parts[2])
    chosen = rows_to_train(scaled, ready.fit, rows, limit)
    return prepared(scaled, ready, chosen, limit=limit, seed=seed)


def prepared(
    output: OutputLayer, split: Split, rows: Tensor, *, limit: int, seed: int, down: Tensor | None = None
) -> Setting:
    """Draw the rows that are not trained; `down` [D, r] takes the states to an output layer of width r."""
    generator = torch.Generator(device=output.weight.device).manual_seed(seed)
    seen = torch.unique(torch.cat([rows, split.choose.targets]))
    return Setting(
        output=output,
        split=split,
        fit=sample(output, split.fit, rows, DRAWN, limit, generator, down),
        choose=sample(output, split.choose, seen, 4 * DRAWN, limit, generator, down),
        limit=limit,
    )


@torch.no_grad()
def rows_to_train(output: OutputLayer, fit: Tokens, rows: int, limit: int) -> Tensor:
    """Ids, rising: every token that occurs, then those with the largest mean probability."""
    occurring = torch.unique(fit.targets)
    if len(occurring) >= output.vocabulary:
        return occurring
    spread = fit.hidden[:: max(1, len(fit) // 512)]
    share = torch.zeros(output.vocabulary, device=fit.hidden.device)
    for piece in output.pieces(spread, limit // 2):
        share += torch.softmax(output.logits(piece), dim=1).sum(dim=0)
    share[occurring] = math.inf
    count = min(max(rows, len(occurring)), output.vocabulary)
    return share.topk(count).indices.sort().values


@torch.no_grad()
def sample(
    output: OutputLayer,
    tokens: Tokens,
    rows: Tensor,
    count: int,
    limit: int,
    generator: torch.Generator,
    down: Tensor | None = None,
) -> Sampled:
    """Draw `count` of the other rows for each token, from the start's own distribution over them."""
    device = tokens.hidden.device
    other = torch.ones(output.vocabulary, dtype=torch.bool, device=device)
    other[rows] = False
    ids = other.nonzero()[:, 0]
    place = torch.searchsorted(rows, tokens.targets)
    if len(ids) == 0:
        nothing = torch.zeros(len(tokens), 1, dtype=torch.int64, device=device)
        return Sampled(
            tokens=tokens, rows=rows, place=place, drawn=nothing,
            scores=torch.zeros(len(tokens), 1, device=device),
            normaliser=torch.full((len(tokens),), -math.inf, device=device),
        )  # fmt: skip
    weight = output.weight[ids]
    bias = None if output.bias is None else output.bias[ids]
    drawn, scores, normaliser = [], [], []
    for hidden in output.pieces(tokens.hidden if down is None else tokens.hidden @ down, limit // 2):
        found = hidden @ weight.T
        if bias is not None:
            found += bias
        found = output.pointwise(found)
        total = found.logsumexp(dim=1)
        sums = (found - total[:, None]).exp_().cumsum_(dim=1)
        at = torch.rand(len(hidden), count, device=device, generator=generator) * sums[:, -1:]
        which = torch.searchsorted(sums, at).clamp_(max=len(ids) - 1)
        drawn.append(ids[which])
        scores.append(found.gather(1, which))
        normaliser.append(total)
    return Sampled(
        tokens=tokens, rows=rows, place=place, drawn=torch.cat(drawn), scores=torch.cat(scores),
        normaliser=torch.cat(normaliser),
    )  # fmt: skip


def fit(
    setting: Setting,
    contexts: Callable[[], nn.Module],
    *,
    pointwise: Pointwise | None = None,
    offsets: Sequence[float] = (),
    rates: Sequence[float] = RATES,
    epochs: int = EPOCHS,
    seed: int = 0,
    progress: Callable[[float], None] = lambda share: None,
) -> Fitted:
    """Race the learning rates over one pass of the text, go on with the best, keep the best stopping point.

    `offsets` are starts to try for a score offset, which is then trained; without any there is none. The
    start itself is a stopping point too: a head that only gets worse is returned as it came.
    """
    function = setting.output.pointwise if pointwise is None else pointwise
    offset = _best_offset(setting, contexts, function, offsets, seed)
    runs = [_Run(setting, contexts, function, offset, rate, epochs, seed) for rate in rates]
    planned = len(runs) + epochs
    for number, run in enumerate(runs, start=1):
        run.epoch()
        progress(number / planned)
    best = min(runs, key=lambda run: run.best[0])
    for number in range(epochs - 1):
        best.epoch()
        progress((len(runs) + number + 1) / planned)
    return best.finish()


class _Run:
    """One fit: AdamW with a short warm-up, falling to zero over the epochs."""

    def __init__(
        self,
        setting: Setting,
        contexts: Callable[[], nn.Module],
        pointwise: Pointwise,
        offset: float | None,
        rate: float,
        epochs: int,
        seed: int,
    ) -> None:
        torch.manual_seed(seed)
        self.setting, self.rate = setting, rate
        device = setting.output.weight.device
        self.model = Frozen(setting.output, setting.trained_rows, contexts().to(device), pointwise, offset)
        self.optimiser = torch.optim.AdamW(
            self.model.groups(rate, setting.split.fit.hidden.shape[1]), betas=(0.9, 0.99), weight_decay=0.0
        )
        self.peaks = [group["lr"] for group in self.optimiser.param_groups]
        self.generator = torch.Generator().manual_seed(seed)
        self.size = min(BATCH, len(setting.split.fit))
        self.steps, self.total = 0, epochs * (len(setting.split.fit) // self.size)
        self.best = (self._choose_loss(), 0, self._copy())

    def epoch(self) -> None:
        order = torch.randperm(len(self.setting.split.fit), generator=self.generator)
        for start in range(0, len(order) - self.size + 1, self.size):
            pace = min(1.0, (self.steps + 1) / 5) * (1 - self.steps / self.total)
            for group, peak in zip(self.optimiser.param_groups, self.peaks, strict=True):
                group["lr"] = peak * pace
            chosen = order[start : start + self.size].to(self.setting.output.weight.device)
            loss = self.model.losses(self.setting.fit[chosen]).mean()
            self.optimiser.zero_grad()
            loss.backward()
            self.optimiser.step()
            self.steps += 1
        found = self._choose_loss()
        if found < self.best[0]:
            self.best = (found, self.steps, self._copy())

    def finish(self) -> Fitted:
        loss, steps, state = self.best
        self.model.load_state_dict(state)
        return Fitted(
            losses=self.model.exact_losses(self.setting.split.held_out, self.setting.limit),
            choose_loss=loss,
            rate=self.rate,
            steps=steps,
            parameters=sum(parameter.numel() for parameter in self.model.parameters()),
        )

    @torch.no_grad()
    def _choose_loss(self) -> float:
        total, choose = 0.0, self.setting.choose
        for part in torch.arange(len(choose.tokens), device=choose.place.device).split(512):
            total += float(self.model.losses(choose[part]).double().sum())
        return total / len(choose.tokens)

    def _copy(self) -> dict[str, Tensor]:
        return {name: value.detach().clone() for name, value in self.model.state_dict().items()}


def _best_offset(
    setting: Setting,
    contexts: Callable[[], nn.Module],
    pointwise: Pointwise,
    offsets: Sequence[float],
    seed: int,
) -> float | None:
    if not offsets:
        return None
    torch.manual_seed(seed)
    made = contexts().to(setting.output.weight.device)
    part = setting.fit[torch.arange(min(1024, len(setting.split.fit)), device=setting.fit.place.device)]

    @torch.no_grad()
    def start(offset: float) -> float:
        model = Frozen(setting.output, setting.trained_rows, made, pointwise, offset)
        return float(model.losses(part).mean())

    return min(offsets, key=start)
