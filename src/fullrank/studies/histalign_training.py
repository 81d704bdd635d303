"""One training of `histalign`: the upper layers and what the head adds, then everything that is judged."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from fullrank.fit import checkpoints
from fullrank.heads import Head
from fullrank.heads.alignment import alignment_loss
from fullrank.heads.cache import CacheHead, of_one_length
from fullrank.studies import template_task
from fullrank.studies.histalign_setting import COSINE, RANKED, UNCREDITED, Study, kept_as, start_of
from fullrank.studies.template_task import Batch
from fullrank.studies.upper_training import DivergedError, added, training
from fullrank.theory import least_rank

JUDGED_PROMPTS = 64
"""At once."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Found:
    """One training's end."""

    losses: Tensor
    """[judged tokens] nats."""
    facts: dict[str, Any]


def one(
    study: Study,
    method: str,
    seed: int,
    rate: float | None,
    prompts: Callable[[], dict[str, list[Batch]]],
    progress: Callable[[float], None],
) -> Found:
    """A method, seed and rate, from its file or from its start; None trains nothing."""
    file = study.directory / study.of[:16] / f"{method}-seed{seed}-{rate or 0:g}.safetensors"
    of = kept_as(study.of, file.name, start_of(study.memory, method))
    kept = checkpoints.read(file, of)
    facts = checkpoints.finished(kept)
    if kept is not None and facts is not None:
        progress(1.0)
        return Found(losses=kept[0]["losses"], facts=facts)
    splits = prompts()
    begun = time.process_time()
    head = study.head(method, seed)
    last, steps = None, 0
    study.restore()
    try:
        if rate is not None:
            last, steps = _train(
                study, head, method, seed, rate, splits["train"], lambda share: progress(0.8 * share)
            )
        facts = _judge(study, head, method, splits, lambda share: progress(0.8 + 0.2 * share))
        losses = _losses(study, head)
    finally:
        study.restore()
    facts |= {
        "added": sum(value.numel() for value in added(head).values()),
        "last_loss": last,
        "steps": steps,
        "memory_weight": float(head.memory_weight.detach()) if isinstance(head, CacheHead) else None,
        "seconds": time.process_time() - begun,
    }
    checkpoints.finish(file, of, facts, losses=losses)
    progress(1.0)
    return Found(losses=losses, facts=facts)


def _train(
    study: Study,
    head: Head,
    method: str,
    seed: int,
    rate: float,
    train: Sequence[Batch],
    progress: Callable[[float], None],
) -> tuple[float, int]:
    """Train upper layers and head: mean loss of the answers over the last epoch, and the steps."""
    config, device = study.config, study.device
    steps = [list(_order(train, config.batch, seed, epoch)) for epoch in range(config.epochs)]
    total, done, answered = sum(map(len, steps)), 0, 0
    # Of the last epoch; on the device, so that no step waits for it.
    sums = torch.zeros((), device=device)
    draw = torch.Generator().manual_seed(seed)
    windows = _cycle(len(study.training_ids), seed)

    def losses(ids: Tensor, recorded: Tensor, answers: Tensor, *text: Tensor) -> tuple[Tensor, ...]:
        """To train on, and of the answers; `text` is ids of ordinary text and what is recorded of it."""
        targets = torch.full_like(ids, -100)
        targets[:, -1] = answers
        credited = _uncredited(ids, answers) if method in UNCREDITED else ids
        loss, likelihood = _loss(study, head, method, ids, recorded, targets, credited)
        # A batch may be short, for want of prompts of its length: every prompt counts alike.
        loss = loss * (len(ids) / config.batch)
        if text:
            ids, recorded = text
            targets = torch.cat([ids[:, 1:], torch.full_like(ids[:, :1], -100)], dim=1)
            loss = loss + _loss(study, head, method, ids, recorded, targets, ids)[0]
        return loss, likelihood

    with training(study.upper, head, losses, rate=rate, steps=total, weighs=not config.as_published) as step:
        for batches in steps:
            sums, answered = torch.zeros_like(sums), 0
            for batch in batches:
                which = torch.randint(2, (len(batch), 1), generator=draw).to(device, non_blocking=True)
                answers = batch.pieces[:, :2, 0].gather(1, which)[:, 0]
                text: tuple[Tensor, ...] = ()
                if not config.as_published:
                    place = next(windows)
                    text = study.training_ids[place], study.training[place]
                _, likelihood = step(batch.ids, batch.recorded, answers, *text)
                done += 1
                sums, answered = sums + likelihood * len(batch), answered + len(batch)
                progress(done / total)
    found = float(sums) / answered
    if not math.isfinite(found):
        raise DivergedError(method, rate)
    return found, total


def _loss(
    study: Study, head: Head, method: str, ids: Tensor, recorded: Tensor, targets: Tensor, credited: Tensor
) -> tuple[Tensor, Tensor]:
    """What is trained on, and its likelihood part, which takes the memories' tokens from ids `credited`."""
    states = study.upper.states(ids, recorded)
    likelihood = cast(Tensor, head(states, targets, context=credited))
    loss = likelihood
    if method in RANKED:
        config = study.config
        ranked = alignment_loss(
            cast(CacheHead, head),
            states,
            targets,
            context=ids,
            margin=config.margin,
            pairs=RANKED[method],
        )
        loss = loss + config.align * ranked
    return loss, likelihood


def _uncredited(ids: Tensor, answers: Tensor) -> Tensor:
    """Ids [n, time] with another token in place of each row's answer [n]: the memories that hold it still
    weigh against it and are not credited, as where memories are matched through labels that a prompt has
    not."""
    other = torch.where(answers == 0, 1, 0)
    return torch.where(ids == answers[:, None], other[:, None], ids)


def _order(batches: Sequence[Batch], size: int, seed: int, epoch: int) -> Iterator[Batch]:
    """The prompts of an epoch in batches of one length, in a drawn order."""
    generator = torch.Generator().manual_seed(1000 * seed + epoch)
    parts = []
    for batch in batches:
        order = torch.randperm(len(batch), generator=generator)
        parts += [batch.some(part) for part in order.split(size)]
    for place in torch.randperm(len(parts), generator=generator).tolist():
        yield parts[place]


def _cycle(count: int, seed: int) -> Iterator[slice]:
    """Windows of text in a drawn order, over and over."""
    generator = torch.Generator().manual_seed(seed)
    while count:
        for place in torch.randperm(count, generator=generator).tolist():
            yield slice(place, place + 1)


@torch.no_grad()
def _judge(
    study: Study,
    head: Head,
    method: str,
    splits: Mapping[str, Sequence[Batch]],
    progress: Callable[[float], None],
) -> dict[str, Any]:
    head.eval()
    facts: dict[str, Any] = {}
    kind = study.memory[method in COSINE]
    for place, (name, batches) in enumerate(splits.items()):
        full, memory, losses = [], [], []
        for whole in batches:
            for batch in (whole.some(part) for part in torch.arange(len(whole)).split(JUDGED_PROMPTS)):
                states = study.upper.states(batch.ids, batch.recorded)
                log_probs = answer_log_probs(head, states, batch.ids)
                full.append(template_task.ranks(log_probs, batch.pieces))
                losses.append(-log_probs.gather(1, batch.pieces[:, :2, 0]).mean(1))
                keys = of_one_length(states) if kind.cosine else states
                alone = template_task.memory_log_probs(keys, batch.ids, head.vocab, kind.temperature)
                memory.append(template_task.ranks(alone, batch.pieces))
        facts[name] = {
            "prompts": sum(map(len, batches)),
            "loss": float(torch.cat(losses).double().mean()),
            "full": template_task.accuracy(torch.cat(full)),
            "memory": template_task.accuracy(torch.cat(memory)),
        }
        progress((place + 1) / (len(splits) + 1))
    facts["rank"] = _rank(study, head, splits["no overlap"])
    return facts


def answer_log_probs(head: Head, states: Tensor, ids: Tensor) -> Tensor:
    """Log-probabilities [n, V] at the last of states [n, time, H]; what came before is memory only."""
    if not isinstance(head, CacheHead):
        return cast(Tensor, head(states[:, -1]))
    memory = head.remember(states[:, :-1], context=ids[:, :-1])
    return cast(Tensor, head(states[:, -1:], context=ids[:, -1:], memory=memory))[:, 0]


def _rank(study: Study, head: Head, batches: Sequence[Batch]) -> int:
    """Least rank of the log-probabilities of prompts' positions over the prompts' tokens and others."""
    seen = torch.cat([batch.ids.flatten() for batch in batches]).unique().cpu()
    generator = torch.Generator().manual_seed(0)
    others = torch.randperm(head.vocab, generator=generator)
    columns = torch.cat([seen, others[~torch.isin(others, seen)]])[: study.config.rank_tokens]
    rows: list[Tensor] = []
    met: set[tuple[int, ...]] = set()
    for whole in batches:
        for batch in (whole.some(part) for part in torch.arange(len(whole)).split(16)):
            # Prompts of one sentence begin alike: a context counts once.
            fresh = [_new(met, ids) for ids in batch.ids.tolist()]
            states = study.upper.states(batch.ids, batch.recorded)
            log_probs = cast(Tensor, head(states, context=batch.ids))
            rows.append(log_probs.cpu()[torch.tensor(fresh)][:, columns])
            if sum(map(len, rows)) >= study.config.rank_contexts:
                return least_rank(torch.cat(rows)[: study.config.rank_contexts]).rank
    return least_rank(torch.cat(rows)).rank


def _new(met: set[tuple[int, ...]], ids: Sequence[int]) -> list[bool]:
    """Which beginnings of a prompt were not met before; they are from now on."""
    found = []
    for stop in range(1, len(ids) + 1):
        found.append(tuple(ids[:stop]) not in met)
        met.add(tuple(ids[:stop]))
    return found


@torch.no_grad()
def _losses(study: Study, head: Head) -> Tensor:
    """[judged tokens] nats, ordinary text first, then that with names."""
    head.eval()
    found = []
    for text in study.judged:
        for part in torch.arange(len(text.ids)).split(4):
            ids = text.ids[part]
            states = study.upper.states(ids, text.recorded[part])[:, :-1]
            loss = head(states, ids[:, 1:], context=ids[:, :-1], reduction="none")
            found.append(cast(Tensor, loss).flatten().cpu())
    return torch.cat(found)
