"""Does a memory, the ranking loss that aligns it, or a mixture help where softmax cannot rank two words?

HistAlign (Wan et al. 2023, 2305.04782) asks this of GPT-2 with ambiguous templates (`templates`). Here the
same layers of one model are trained in several ways, or not at all, from the same weights and on the same
prompts in the same order:

    base            not trained
    cache           not trained, with a memory of the text (`heads.cache`)
    softmax         trained as it is: what training alone does
    trime           with the memory, by likelihood
    histalign       the same, and by the ranking loss of `heads.alignment`, a mean over a position's pairs
    histalign_sum   the same, a sum over the pairs, as published
    mos             a mixture of softmaxes, which has the rank and no memory

and, for whoever asks where a difference comes from,

    histalign_cosine       as histalign, with cosines of states in place of their products
    trime_uncredited       as trime, but answers in the prompt are not credited to the memory, as in the code
                           that was released for HistAlign, where memories are matched through labels
    histalign_uncredited   the ranking loss beside that

Trained are the last `layers` of the body and what the head adds; everything below, embedding and output
matrix are frozen, so the states below are made once (`upper_layers`). A step sees `batch` prompts, of which
only the answer counts, one of the two drawn anew each time, and one window of ordinary text, of which every
token counts: loss = mean over answers + mean over text, and for HistAlign `align` times the ranking loss of
both. The memory's temperature and its log weight at the start are those with the least loss on the ordinary
text to train on, before any training; the weight is then learned. Every method is given the same rates to try
with the first seed, further ones while the best stands at an end, and keeps the one with the least loss of
both answers on the prompts with one overlap.

As published, the answers alone are trained on, the temperature is sqrt(H), and the log weight is 0 and not
learned. On a model whose states are large, as SmolLM2's are, such a memory outweighs the vocabulary nearly
everywhere.

Judged are `templates` prompts, ordinary text that was not trained on, and text with rare names (`names`).
Each seed draws the split of the word pairs, the prompts, the order and the start of the head. A training that
is done is kept in a file; the same call goes on with the next.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fullrank.fit import estimates
from fullrank.models import loading
from fullrank.results.histalign import TemplateAccuracy, TemplateMethod, Templates, TextLoss
from fullrank.studies import template_task
from fullrank.studies.histalign_setting import (
    COSINE,
    KINDS,
    SPLITS,
    UNTRAINED,
    Config,
    Study,
    cosine_note,
    losses_by_rate,
)
from fullrank.studies.histalign_training import Found, one
from fullrank.studies.template_task import Batch
from fullrank.studies.upper_training import MEMORY_RATE

Progress = Callable[[str, float], None]


def run(
    loaded: loading.Loaded,
    files: Sequence[Path],
    config: Config,
    *,
    directory: Path,
    progress: Progress = lambda stage, share: None,
) -> Templates:
    """All methods and seeds; `files` are ordinary text, the standard library's where there are none, and
    `directory` is where finished trainings are kept."""
    study = Study(loaded, files, config, directory)
    progress("frozen layers: text", 0.0)
    study.prepare(lambda share: progress("frozen layers: text", share))
    found: dict[str, list[Found]] = {method: [] for method in config.methods}
    tried: dict[str, dict[float, float]] = {}
    count = len(config.seeds) * len(config.methods)
    for number, seed in enumerate(config.seeds):
        cached: dict[str, list[Batch]] = {}

        def prompts(seed: int = seed, cached: dict[str, list[Batch]] = cached) -> dict[str, list[Batch]]:
            if not cached:
                progress(f"frozen layers: prompts of seed {seed}", 0.0)
                cached.update(
                    study.prompts(
                        seed, lambda share: progress(f"frozen layers: prompts of seed {seed}", share)
                    )
                )
            return cached

        for place, method in enumerate(config.methods):
            done = number * len(config.methods) + place

            def report(share: float, done: int = done, method: str = method, seed: int = seed) -> None:
                progress(f"training: {method}, seed {seed}", (done + share) / count)

            if number == 0 and method not in UNTRAINED:

                def loss(rate: float, method: str = method, seed: int = seed, say: Any = report) -> float:
                    return float(one(study, method, seed, rate, prompts, say).facts["one overlap"]["loss"])

                tried[method] = losses_by_rate(config.rates, loss)
            losses = tried.get(method)
            rate = None if losses is None else min(losses, key=losses.__getitem__)
            found[method].append(one(study, method, seed, rate, prompts, report))
    return _record(study, found, tried)


def _record(
    study: Study, found: Mapping[str, Sequence[Found]], tried: Mapping[str, dict[float, float]]
) -> Templates:
    config = study.config
    kinds = torch.cat([text.kinds.flatten() for text in study.judged])
    plain, told = study.judged
    first = plain.blocks()
    blocks = torch.cat([first.flatten(), told.blocks(int(first.max()) + 1).flatten()])
    base = [one.losses for one in found["base"]]
    layers = study.upper.parameters().values()
    return Templates(
        model=study.loaded.name,
        fingerprint=study.loaded.fingerprint,
        width=study.plain.lm_head.width,
        vocabulary=study.plain.lm_head.vocab,
        layers=config.layers,
        trained=sum(parameter.numel() for parameter in layers),
        seeds=config.seeds,
        epochs=config.epochs,
        steps=max(one.facts["steps"] for many in found.values() for one in many),
        batch=config.batch,
        text_tokens=config.text_tokens,
        rates={"memory weight, in units of the layers'": MEMORY_RATE},
        margin=config.margin,
        align=config.align,
        as_published=config.as_published,
        temperature=study.memory[False].temperature,
        memory_start=study.memory[False].weight,
        text=study.sources,
        text_sha256=study.sha256,
        window=config.window,
        rank_contexts=config.rank_contexts,
        rank_tokens=config.rank_tokens,
        methods=tuple(
            _method(name, many, tried.get(name, {}), base, kinds, blocks) for name, many in found.items()
        ),
        notes=() if not set(COSINE) & set(found) else (cosine_note(study.memory[True]),),
    )


def _method(
    name: str,
    found: Sequence[Found],
    tried: dict[float, float],
    base: Sequence[Tensor],
    kinds: Tensor,
    blocks: Tensor,
) -> TemplateMethod:
    facts = [one.facts for one in found]
    accuracies = []
    for split in SPLITS:
        for scores in ("full", "memory"):
            shares = [one[split][scores] for one in facts]
            accuracies.append(
                TemplateAccuracy(
                    split=split,
                    scores=scores,
                    prompts=facts[0][split]["prompts"],
                    top={str(k): tuple(one[str(k)] for one in shares) for k in template_task.TOP},
                    distracted=tuple(one["distracted"] for one in shares),
                )
            )
    losses = []
    for number, kind in enumerate(KINDS):
        chosen = kinds == number
        mine = [one.losses[chosen] for one in found]
        changes = [one - before[chosen] for one, before in zip(mine, base, strict=True)]
        losses.append(
            TextLoss(
                tokens=kind,
                count=int(chosen.sum()),
                loss=estimates.mean_over_seeds(mine, blocks[chosen]),
                change=estimates.mean_over_seeds(changes, blocks[chosen]),
                by_seed=tuple(float(one.double().mean()) for one in mine),
            )
        )
    weights = [one["memory_weight"] for one in facts if one["memory_weight"] is not None]
    return TemplateMethod(
        method=name,
        added=facts[0]["added"],
        rate=min(tried, key=tried.__getitem__) if tried else None,
        tried={f"{rate:g}": loss for rate, loss in tried.items()},
        accuracies=tuple(accuracies),
        losses=tuple(losses),
        least_rank=tuple(one["rank"] for one in facts),
        memory_weight=tuple(weights),
        last_loss=tuple(one["last_loss"] for one in facts if one["last_loss"] is not None),
        seconds=tuple(one["seconds"] for one in facts),
    )
