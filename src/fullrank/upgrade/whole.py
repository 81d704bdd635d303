"""Train an upgraded model whole, body and all, against the same two controls.

Each control and the upgraded head gets a copy of the body and the same training by the one loop of fits
(`fit.loop`): windows of text, learning rates raced from the same grid, steady until the curve on the text for
choosing is flat, a fall to zero. The best weights are kept, and judged on text that nothing was chosen on. A
matrix that is tied stays tied. With a teacher (`teaching`) all are trained on KL(teacher || model).

Crash-safe as that loop is: the same call goes on from the last checkpoint and ends with the same numbers. The
files are removed by the caller, with the directory.
"""

from __future__ import annotations

import copy
import dataclasses
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from fullrank.errors import FullrankError
from fullrank.fit import checkpoints, controls, estimates, loop, states
from fullrank.fit.collect import Windows
from fullrank.fit.comparison import Gain, Progress, Settings, gain_over
from fullrank.fit.teacher import Teacher, check_students
from fullrank.heads import CacheHead, Head
from fullrank.heads.alignment import alignment_loss
from fullrank.heads.rows import RowHead
from fullrank.results.upgrade import TrainedHead, TrainingText, UpgradeTraining
from fullrank.upgrade.teaching import TeacherModel, distance

RATES = (2e-5, 8e-5)
"""Learning rates of what the original has, body and matrix, to begin with."""
ADDED = 25.0
"""How much faster what the head adds learns."""
WEIGHT = 500.0
"""A memory's weight is in nats, and far from where it is going: how much faster it learns."""
BATCH = 4
"""Windows a step."""
EPOCHS = 6
"""Passes over the text, at most."""
CLIP = 1.0
"""Largest norm of the gradient of all parameters."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Split:
    """Windows of ids [windows, length] in three parts, in the text's order."""

    fit: Tensor
    choose: Tensor
    held_out: Tensor


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Found:
    """One training's end."""

    losses: Tensor
    """[held-out tokens] nats."""
    choose_loss: float
    rate: float
    steps: int
    divergences: Tensor | None = None
    """[held-out tokens] from the teacher, in nats."""


def fit_whole(
    model: Any,
    plain: Head,
    windows: Windows,
    *,
    settings: Settings,
    directory: Path,
    teacher: TeacherModel | None = None,
    progress: Progress = lambda stage, share: None,
) -> UpgradeTraining:
    """Train copies of `model` with both controls and with its own head; the best seed's weights stay in it.

    `plain` is the original output layer as a head. `directory` holds checkpoints.
    """
    head: Head = model.lm_head
    if head.name in controls.CONTROLS:
        raise FullrankError(
            f"{head.name} is what an upgraded head is held against: name another head to train, such as mos"
        )
    if teacher is not None:
        check_students([head])
    started = time.monotonic()
    parts = _split(windows.ids.to(next(model.parameters()).device))
    heads: dict[str, Head] = {
        **controls.controls(head, plain),
        head.name: head,
    }
    size = float(states.head_states(model, parts.fit[:1])[0].square().mean().sqrt())
    of = _digest(model, parts, settings, teacher)
    found: dict[str, list[Found]] = {}
    before: dict[str, tuple[Tensor, Tensor | None]] = {}
    seconds: dict[str, float] = {}
    for place, (name, one) in enumerate(heads.items()):
        begun = time.monotonic()
        before[name] = _judged(Whole(_copy(model, one, size, settings.seed), parts, 0.0, teacher))
        found[name] = []
        for seed in range(settings.seeds):

            def report(share: float, name: str = name, place: int = place, seed: int = seed) -> None:
                progress(f"training: {name}", (place + (seed + share) / settings.seeds) / len(heads))

            # One seed races the learning rates, the others take its choice.
            plan = loop.Plan(
                rates=RATES if seed == 0 else (found[name][0].rate,),
                epochs=min(EPOCHS, settings.epochs),
                patience=settings.patience,
                tolerance=settings.tolerance,
                clip=CLIP,
            )
            file = _file(directory / name, settings.seed + seed)

            def start(one: Head = one, seed: int = seed) -> Whole:
                return Whole(_copy(model, one, size, settings.seed + seed), parts, settings.align, teacher)

            found[name].append(
                _train(start, plan, settings.seed + seed, file, of, wanted=one is head, progress=report)
            )
        seconds[name] = time.monotonic() - begun
    length = parts.held_out.shape[1] - 1
    blocks = torch.arange(len(parts.held_out))[:, None].expand(-1, length)
    blocks = (blocks * -(-length // estimates.BLOCK) + torch.arange(length) // estimates.BLOCK).flatten()
    best = found[head.name]

    def gained(values: Callable[[Found], Tensor | None]) -> Gain:
        def of_all(name: str) -> list[Tensor]:
            return [one for one in map(values, found[name]) if one is not None]

        return gain_over(of_all, head.name, controls.CONTROLS, blocks)

    gain = gained(lambda one: one.losses)
    saved = min(range(len(best)), key=lambda seed: best[seed].choose_loss)
    _load(model, _file(directory / head.name, settings.seed + saved), of)
    return UpgradeTraining(
        text=TrainingText(
            sources=windows.sources,
            sha256=windows.sha256,
            window=windows.ids.shape[1],
            fit_tokens=parts.fit[:, 1:].numel(),
            choose_tokens=parts.choose[:, 1:].numel(),
            held_out_tokens=parts.held_out[:, 1:].numel(),
        ),
        unfrozen=True,
        rows=head.vocab,
        exact=True,
        seeds=settings.seeds,
        fits=tuple(
            _row(name, one, model, found[name], before[name], blocks, seconds[name])
            for name, one in heads.items()
        ),
        control=gain.control,
        gain=gain.mean,
        gain_by_seed=gain.by_seed,
        saved_seed=saved,
        saved_loss=float(best[saved].losses.double().mean()),
        untied=False,
        candidates=(),
        seconds=time.monotonic() - started,
        teacher=None
        if teacher is None
        else teacher.record(gained(lambda one: one.divergences), settings.memory // 4),
    )


def _split(ids: Tensor) -> Split:
    count = len(ids)
    first = max(1, count * 4 // 7)
    second = max(first + 1, count * 5 // 7)
    if count < 3:
        raise FullrankError(
            f"{ids.numel()} tokens are too few to train on one part and judge on another: give more text"
        )
    return Split(fit=ids[:first], choose=ids[first:second], held_out=ids[second:])


def _copy(model: Any, head: Head, size: float, seed: int) -> Any:
    """The model with a copy of everything, and this head; tied as the model is."""
    torch.manual_seed(seed)
    tied = model.get_input_embeddings().weight is model.lm_head.decoder.weight
    other = copy.deepcopy(model)
    other.lm_head = copy.deepcopy(head)
    if tied:
        other.lm_head.decoder.weight = other.get_input_embeddings().weight
    other.lm_head.redraw(size)
    return other.requires_grad_(True)


class Whole:
    """A model as the loop sees it (`loop.Learner`): windows are its examples."""

    def __init__(self, model: Any, parts: Split, align: float, teacher: Teacher | None = None) -> None:
        self.model, self.parts, self.align, self.teacher = model.train(), parts, align, teacher

    @property
    def examples(self) -> int:
        return len(self.parts.fit)

    @property
    def batch(self) -> int:
        return BATCH

    @property
    def device(self) -> torch.device:
        return self.parts.fit.device

    @property
    def graph(self) -> bool:
        return False

    def trained(self) -> list[tuple[str, nn.Parameter]]:
        return list(self.model.named_parameters())

    def groups(self, rate: float) -> list[dict[str, Any]]:
        added = dict(self.model.lm_head.own_parameters())
        weight = [added.pop("memory_weight")] if "memory_weight" in added else []
        mine = {id(parameter) for parameter in (*added.values(), *weight)}
        rest = [parameter for parameter in self.model.parameters() if id(parameter) not in mine]
        groups = [
            {"params": rest, "lr": rate},
            {"params": list(added.values()), "lr": rate * ADDED},
            {"params": weight, "lr": rate * ADDED * WEIGHT},
        ]
        return [group for group in groups if group["params"]]

    def loss(self, chosen: Tensor) -> Tensor:
        ids, teacher = self.parts.fit[chosen], self.teacher
        if teacher is None:
            return _loss(self.model, ids, self.align)
        return _divergence(self.model, ids, teacher, teacher.parts.fit.windows(chosen), "mean")

    def choose_loss(self) -> float:
        ids, teacher = self.parts.choose, self.teacher
        taught = None if teacher is None else _divergences(self.model, ids, teacher, teacher.parts.choose)
        found = _mean(_losses(self.model, ids) if taught is None else taught)
        self.model.train()
        return found


def _train(
    start: Callable[[], Whole],
    plan: loop.Plan,
    seed: int,
    file: Path,
    of: str,
    *,
    wanted: bool,
    progress: Callable[[float], None],
) -> Found:
    """One training from its start or from its last checkpoint; its weights stay in the file where wanted."""
    name = _name(of, file)
    kept = checkpoints.read(file, name, weights=False)
    facts = checkpoints.finished(kept)
    if kept is not None and facts is not None:
        progress(1.0)
        return Found(losses=kept[0]["losses"], divergences=kept[0].get("divergences"), **facts)
    ended = loop.fit(start, plan, seed=seed, file=file, of=name, progress=progress)
    judged = start()
    with torch.no_grad():
        for which, parameter in judged.trained():
            parameter.copy_(ended.weights[which])
    losses, divergences = _judged(judged)
    facts = {"choose_loss": ended.choose_loss, "rate": ended.rate, "steps": ended.steps}
    best = ended.weights if wanted else None
    checkpoints.finish(file, name, facts, losses=losses, divergences=divergences, best=best)
    return Found(losses=losses, divergences=divergences, **facts)


def _loss(model: Any, ids: Tensor, align: float) -> Tensor:
    """Nats per token, and with `align` HistAlign's ranking loss of a cache head."""
    head = model.lm_head
    if not align or not isinstance(head, CacheHead):
        return cast(Tensor, model(input_ids=ids, labels=ids, use_cache=False, return_logits=False).loss)
    states, context, _ = model.head_inputs(ids)
    targets = nn.functional.pad(ids, (0, 1), value=-100)[:, 1:]
    ranking = alignment_loss(head, states, targets, context=context)
    return cast(Tensor, head(states, targets, context=context)) + align * ranking


def _divergence(model: Any, ids: Tensor, teacher: Teacher, part: states.Part, reduction: str) -> Tensor:
    """Nats per token from what a teacher says of the same windows, differentiable."""
    read = model.head_inputs(ids[:, :-1]).states
    return cast(RowHead, model.lm_head).divergence(read, teacher.says(part.states), reduction=reduction)


@torch.no_grad()
def _divergences(model: Any, ids: Tensor, teacher: Teacher, part: states.Part) -> Tensor:
    """[tokens] nats."""
    model.eval()
    pieces = torch.arange(len(ids), device=ids.device).split(BATCH)
    found = [_divergence(model, ids[one], teacher, part.windows(one), "none").flatten() for one in pieces]
    return torch.cat(found).clamp_(min=0.0).cpu()


def _judged(whole: Whole) -> tuple[Tensor, Tensor | None]:
    """[held-out tokens] losses, and divergences from the teacher where there is one."""
    ids, teacher = whole.parts.held_out, whole.teacher
    losses = _losses(whole.model, ids)
    return losses, None if teacher is None else _divergences(
        whole.model, ids, teacher, teacher.parts.held_out
    )


def _file(directory: Path, seed: int) -> Path:
    return directory / f"seed{seed}.safetensors"


def _digest(model: Any, parts: Split, settings: Settings, teacher: Teacher | None) -> str:
    """Of all that the trainings' numbers depend on, but for what a file's name says."""
    # What the head draws at its start is drawn anew for each seed.
    body = [value for name, value in model.named_parameters() if not name.startswith("lm_head.")]
    head = [model.config.head, model.lm_head.decoder.weight]
    plans = [dataclasses.asdict(settings), RATES, ADDED, BATCH]
    taught = [] if teacher is None else teacher.digest()
    return checkpoints.digest(*plans, *head, parts.fit, parts.choose, parts.held_out, *body, *taught)


def _name(of: str, file: Path) -> str:
    return f"{of} {file.parent.name} {file.name}"


@torch.no_grad()
def _load(model: Any, file: Path, of: str) -> None:
    kept = checkpoints.read(file, _name(of, file))
    if kept is None:
        raise FullrankError(f"{file} has gone while it was needed: run the same command again")
    best = checkpoints.best_of(kept)
    for name, parameter in model.named_parameters():
        parameter.copy_(best[name])


@torch.no_grad()
def _losses(model: Any, ids: Tensor) -> Tensor:
    """[tokens] nats, over the whole vocabulary."""
    model.eval()
    found = []
    for piece in ids.split(BATCH):
        entered = [state[:, :-1] for state in states.head_states(model, piece)]
        head = model.lm_head
        context = piece[:, :-1] if head.needs_context else None
        found.append(head(entered, piece[:, 1:], context=context, reduction="none").flatten())
    return torch.cat(found).cpu()


def _mean(losses: Tensor) -> float:
    return float(losses.double().mean())


def _row(
    name: str,
    head: Head,
    model: Any,
    found: Sequence[Found],
    start: tuple[Tensor, Tensor | None],
    blocks: Tensor,
    seconds: float,
) -> TrainedHead:
    before, apart = start
    mean = torch.stack([one.losses for one in found]).mean(dim=0)
    body = sum(parameter.numel() for parameter in model.model.parameters())
    tied = model.get_input_embeddings().weight is model.lm_head.decoder.weight
    matrix = 0 if tied else model.lm_head.decoder.weight.numel()
    return TrainedHead(
        head=name,
        parameters=controls.size(head),
        trained=body + matrix + controls.size(head),
        before=estimates.mean(before, blocks),
        before_error=estimates.mean_and_error(before, blocks)[1],
        after=estimates.mean_over_seeds([one.losses for one in found], blocks),
        after_error=estimates.mean_and_error(mean, blocks)[1],
        choose_loss=sum(one.choose_loss for one in found) / len(found),
        after_by_seed=tuple(_mean(one.losses) for one in found),
        rate=found[0].rate,
        steps=tuple(one.steps for one in found),
        seconds=seconds,
        distance=distance(apart, [one.divergences for one in found if one.divergences is not None], blocks),
    )
