"""Train an upgraded model whole, body and all, against the same two controls.

Each control and the upgraded head gets a copy of the body and the same training: AdamW on windows of text,
the same pairs of learning rates to choose from, a warm-up, a fall to zero over the planned epochs, and an end
when `patience` epochs bring nothing on the text for choosing. The best weights are kept, and judged on text
that nothing was chosen on. A matrix that is tied stays tied.

Crash-safe: after every epoch weights, optimiser and best weights go to a file that is written whole
(`checkpoints`). The same call goes on from there and ends with the same numbers; what an epoch had done when
the process died is lost. The files are removed by the caller, with the directory.
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
from fullrank.fit import checkpoints, controls, estimates, states
from fullrank.fit.collect import Windows
from fullrank.fit.comparison import Progress, Settings
from fullrank.fit.loop import WARM_UP
from fullrank.heads import CacheHead, Head
from fullrank.heads.alignment import alignment_loss
from fullrank.results.upgrade import TrainedHead, TrainingText, UpgradeTraining

PACES = ((2e-5, 0.5e-3), (1e-4, 2e-3))
"""Learning rates of what the original has, body and matrix, and of what the head adds."""
WEIGHT = 500.0
"""A memory's weight is in nats, and far from where it is going: how much faster it learns."""
BATCH = 4
"""Windows a step."""
EPOCHS = 6
"""Passes over the text, at most."""


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
    pace: int
    """Which pair of learning rates."""
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

            paces = range(len(PACES)) if seed == 0 else (found[name][0].pace,)
            tried = [
                _train(
                    model,
                    one,
                    size,
                    parts,
                    settings,
                    settings.seed + seed,
                    pace,
                    directory / name,
                    of,
                    report,
                )
                for pace in paces
            ]
            found[name].append(min(tried, key=lambda item: item.choose_loss))
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
    _load(model, _file(directory / head.name, settings.seed + saved, best[saved].pace), of)
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


def _train(
    model: Any,
    head: Head,
    size: float,
    parts: Split,
    settings: Settings,
    seed: int,
    pace: int,
    directory: Path,
    of: str,
    progress: Callable[[float], None],
) -> Found:
    """One training from its start or from its last checkpoint."""
    file = _file(directory, seed, pace)
    kept = checkpoints.read(file, _name(of, file), weights=False)
    facts = checkpoints.finished(kept)
    if kept is not None and facts is not None:
        progress(1.0)
        return Found(losses=kept[0]["losses"], **facts)
    trained = _copy(model, head, size, seed)
    old, new = PACES[pace]
    added = dict(trained.lm_head.own_parameters())
    own = [one for name, one in added.items() if name != "memory_weight"]
    weight = [added["memory_weight"]] if "memory_weight" in added else []
    mine = {id(parameter) for parameter in (*own, *weight)}
    rest = [parameter for parameter in trained.parameters() if id(parameter) not in mine]
    groups = [
        {"params": rest, "lr": old},
        {"params": own, "lr": new},
        {"params": weight, "lr": new * WEIGHT},
    ]
    optimiser = torch.optim.AdamW(
        [group for group in groups if group["params"]], betas=(0.9, 0.99), weight_decay=0.0
    )
    peaks = [group["lr"] for group in optimiser.param_groups]
    batch = min(BATCH, len(parts.fit))
    each = len(parts.fit) // batch
    parameters = dict(trained.named_parameters())
    state: dict[str, Any]
    if kept is None:
        state = {"epoch": 0, "best": _mean(_losses(trained, parts.choose)), "steps": 0, "idle": 0}
        best = checkpoints.weights(parameters)
    else:
        state, best = checkpoints.resume(kept, parameters, optimiser)
        del kept
    epochs = min(EPOCHS, settings.epochs)
    while state["epoch"] < epochs and state["idle"] < settings.patience:
        trained.train()
        generator = torch.Generator().manual_seed(1000 * seed + state["epoch"])
        torch.manual_seed(1000 * seed + state["epoch"])
        order = torch.randperm(len(parts.fit), generator=generator).to(parts.fit.device)
        for number in range(each):
            step = state["epoch"] * each + number
            share = min(1.0, (step + 1) / WARM_UP) * (1 - step / (epochs * each))
            for group, peak in zip(optimiser.param_groups, peaks, strict=True):
                group["lr"] = peak * share
            ids = parts.fit[order[number * batch : (number + 1) * batch]]
            loss = _loss(trained, ids, settings.align)
            optimiser.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(trained.parameters(), 1.0)
            optimiser.step()
            progress((step + 1) / (epochs * each))
        state["epoch"] += 1
        state["idle"] += 1
        reached = _mean(_losses(trained, parts.choose))
        if reached < state["best"]:
            state |= {"best": reached, "steps": state["epoch"] * each, "idle": 0}
            best = checkpoints.weights(parameters)
        checkpoints.keep(file, _name(of, file), parameters, optimiser, state, best)
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(best[name])
    found = Found(
        losses=_losses(trained, parts.held_out), choose_loss=state["best"], pace=pace, steps=state["steps"]
    )
    # Of a control nothing is needed but its losses.
    facts = {"choose_loss": found.choose_loss, "pace": pace, "steps": found.steps}
    checkpoints.finish(file, _name(of, file), found.losses, facts, best if head is model.lm_head else None)
    progress(1.0)
    return found


def _loss(model: Any, ids: Tensor, align: float) -> Tensor:
    """Nats per token, and with `align` HistAlign's ranking loss of a cache head."""
    head = model.lm_head
    if not align or not isinstance(head, CacheHead):
        return cast(Tensor, model(input_ids=ids, labels=ids, use_cache=False).loss)
    states, context, _ = model.head_inputs(ids)
    targets = nn.functional.pad(ids, (0, 1), value=-100)[:, 1:]
    ranking = alignment_loss(head, states, targets, context=context)
    return cast(Tensor, head(states, targets, context=context)) + align * ranking


def _file(directory: Path, seed: int, pace: int) -> Path:
    return directory / f"seed{seed}-pace{pace}.safetensors"


def _digest(model: Any, parts: Split, settings: Settings) -> str:
    """Of all that the trainings' numbers depend on, but for what a file's name says."""
    # What the head draws at its start is drawn anew for each seed.
    body = [value for name, value in model.named_parameters() if not name.startswith("lm_head.")]
    head = [model.config.head, model.lm_head.decoder.weight]
    plans = [dataclasses.asdict(settings), PACES, BATCH]
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
        rate=PACES[found[0].pace][0],
        steps=tuple(one.steps for one in found),
        seconds=seconds,
    )
