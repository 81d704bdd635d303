"""Train an upgraded model whole, body and all, against the same two controls.

Each control and the upgraded head gets a copy of the body and the same training by the one loop of fits
(`fit.loop`): windows of text, learning rates raced from the same grid, steady until the curve on the text for
choosing is flat, a fall to zero. The best weights are kept, and judged on text that nothing was chosen on. A
matrix that is tied stays tied.

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
from fullrank.fit.comparison import Progress, Settings
from fullrank.heads import CacheHead, Head
from fullrank.heads.alignment import alignment_loss
from fullrank.results.upgrade import TrainedHead, TrainingText, UpgradeTraining

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


def fit_whole(
    model: Any,
    plain: Head,
    windows: Windows,
    *,
    settings: Settings,
    directory: Path,
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
    started = time.monotonic()
    parts = _split(windows.ids.to(next(model.parameters()).device))
    heads: dict[str, Head] = {
        **controls.controls(head, plain),
        head.name: head,
    }
    size = float(states.head_states(model, parts.fit[:1])[0].square().mean().sqrt())
    of = _digest(model, parts, settings)
    found: dict[str, list[Found]] = {}
    before: dict[str, Tensor] = {}
    seconds: dict[str, float] = {}
    for place, (name, one) in enumerate(heads.items()):
        begun = time.monotonic()
        before[name] = _losses(_copy(model, one, size, settings.seed), parts.held_out)
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
                return Whole(_copy(model, one, size, settings.seed + seed), parts, settings.align)

            found[name].append(
                _train(start, plan, settings.seed + seed, file, of, wanted=one is head, progress=report)
            )
        seconds[name] = time.monotonic() - begun
    length = parts.held_out.shape[1] - 1
    blocks = torch.arange(len(parts.held_out))[:, None].expand(-1, length)
    blocks = (blocks * -(-length // estimates.BLOCK) + torch.arange(length) // estimates.BLOCK).flatten()
    best = found[head.name]
    control = min(
        controls.CONTROLS, key=lambda name: sum(float(one.losses.double().mean()) for one in found[name])
    )
    differences = [other.losses - one.losses for other, one in zip(found[control], best, strict=True)]
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
        control=control,
        gain=estimates.mean_over_seeds(differences, blocks),
        gain_by_seed=tuple(float(one.double().mean()) for one in differences),
        saved_seed=saved,
        saved_loss=float(best[saved].losses.double().mean()),
        untied=False,
        candidates=(),
        seconds=time.monotonic() - started,
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

    def __init__(self, model: Any, parts: Split, align: float) -> None:
        self.model, self.parts, self.align = model.train(), parts, align

    @property
    def examples(self) -> int:
        return len(self.parts.fit)

    @property
    def batch(self) -> int:
        return BATCH

    @property
    def device(self) -> torch.device:
        return self.parts.fit.device

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
        return _loss(self.model, self.parts.fit[chosen], self.align)

    def choose_loss(self) -> float:
        found = _mean(_losses(self.model, self.parts.choose))
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
        return Found(losses=kept[0]["losses"], **facts)
    ended = loop.fit(start, plan, seed=seed, file=file, of=name, progress=progress)
    judged = start()
    with torch.no_grad():
        for which, parameter in judged.trained():
            parameter.copy_(ended.weights[which])
    losses = _losses(judged.model, judged.parts.held_out)
    facts = {"choose_loss": ended.choose_loss, "rate": ended.rate, "steps": ended.steps}
    checkpoints.finish(file, name, losses, facts, ended.weights if wanted else None)
    return Found(losses=losses, **facts)


def _loss(model: Any, ids: Tensor, align: float) -> Tensor:
    """Nats per token, and with `align` HistAlign's ranking loss of a cache head."""
    head = model.lm_head
    if not align or not isinstance(head, CacheHead):
        return cast(Tensor, model(input_ids=ids, labels=ids, use_cache=False).loss)
    states, context, _ = model.head_inputs(ids)
    targets = nn.functional.pad(ids, (0, 1), value=-100)[:, 1:]
    ranking = alignment_loss(head, states, targets, context=context)
    return cast(Tensor, head(states, targets, context=context)) + align * ranking


def _file(directory: Path, seed: int) -> Path:
    return directory / f"seed{seed}.safetensors"


def _digest(model: Any, parts: Split, settings: Settings) -> str:
    """Of all that the trainings' numbers depend on, but for what a file's name says."""
    # What the head draws at its start is drawn anew for each seed.
    body = [value for name, value in model.named_parameters() if not name.startswith("lm_head.")]
    head = [model.config.head, model.lm_head.decoder.weight]
    plans = [dataclasses.asdict(settings), RATES, ADDED, BATCH]
    return checkpoints.digest(*plans, *head, parts.fit, parts.choose, parts.held_out, *body)


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
    name: str, head: Head, model: Any, found: Sequence[Found], before: Tensor, blocks: Tensor, seconds: float
) -> TrainedHead:
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
    )
