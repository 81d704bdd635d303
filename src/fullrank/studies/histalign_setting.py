"""What all trainings of `histalign` share: settings, states of the frozen layers, and the heads."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from fullrank.errors import FullrankError
from fullrank.fit import checkpoints, collect, estimates
from fullrank.fit.loop import fast_products
from fullrank.heads import Head
from fullrank.heads.alignment import MARGIN
from fullrank.heads.cache import CacheHead, of_one_length
from fullrank.heads.memory import entry_tokens
from fullrank.models import anatomy, loading
from fullrank.ops import linear_logprob
from fullrank.ops.memory.chunked import memory_logsumexp
from fullrank.studies import names, template_task, templates
from fullrank.studies.template_task import Batch
from fullrank.studies.upper_layers import UpperLayers
from fullrank.studies.upper_training import MEMORY_RATE, DivergedError
from fullrank.upgrade import upgrade

METHODS = ("base", "cache", "softmax", "trime", "histalign", "histalign_sum", "mos")
ABLATIONS = ("histalign_cosine", "trime_uncredited", "histalign_uncredited")
"""More methods, for whoever asks."""
UNTRAINED = ("base", "cache")
RANKED = {
    "histalign": "mean",
    "histalign_sum": "sum",
    "histalign_cosine": "mean",
    "histalign_uncredited": "mean",
}
"""Methods with the ranking loss, and what becomes of a position's pairs."""
COSINE = ("histalign_cosine",)
UNCREDITED = ("trime_uncredited", "histalign_uncredited")
MEMORIES = ("cache", "trime", "trunk_cache", "trime_uncredited", *RANKED)
SPLITS = ("train", "one overlap", "no overlap")
GROWTH, BEYOND = 4, 3.0
"""How often a grid of rates may grow, and by which factor."""
FORMAT = 2
"""Of what is kept; raised when its meaning changes."""
STORY = 160
"""Tokens of a text with names that are read."""
CALIBRATED = 32
"""Prompts, texts or windows that the memory's start is chosen on."""
TEMPERATURES = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
"""Of the memory, in units of sqrt(H)."""
WEIGHTS = tuple(float(weight) for weight in range(-100, 12, 2))
OPEN = 0.003
"""Least mean share of the probability that a memory begins with: one that has none learns nothing."""
BODY_BATCH = 24
"""Texts that the frozen layers read at once."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    methods: tuple[str, ...] = METHODS
    seeds: tuple[int, ...] = (0, 1, 2)
    rates: tuple[float, ...] = (3e-5, 1e-4, 3e-4)
    layers: int = 2
    train: int = 192
    """Prompts to train on."""
    held_out: int = 96
    """Prompts of each other split."""
    epochs: int = 3
    batch: int = 24
    """Prompts a step."""
    text_tokens: int = 64
    """Tokens of ordinary text a step."""
    judged_tokens: int = 2048
    """Tokens of ordinary text that are judged on."""
    window: int = 128
    """Tokens of a window that is judged."""
    stories: int = 12
    align: float = 1.0
    margin: float = MARGIN
    components: int = 2
    """Of mos: one for each answer."""
    rank_contexts: int = 768
    rank_tokens: int = 1280
    """Size of the sample for the rank, which is its ceiling."""
    as_published: bool = False
    """Train on the answers alone, with a memory of temperature sqrt(H) and log weight 0, not learned."""

    def __post_init__(self) -> None:
        unknown = sorted(set(self.methods) - {*METHODS, *ABLATIONS})
        if unknown or "base" not in self.methods:
            raise FullrankError(
                f"methods are {', '.join(self.methods) or 'none'}: expected base, which the others are held "
                f"against, and some of {', '.join((*METHODS[1:], *ABLATIONS))}"
            )
        sizes = (self.layers, self.train, self.held_out, self.epochs, self.batch, self.stories)
        rates = self.rates or (0.0,)
        if not self.seeds or min(rates) <= 0 or min(sizes) < 1 or min(self.text_tokens, self.window) < 8:
            raise FullrankError(
                f"{self} is impossible: expected a seed, a rate above 0, 1 or more of everything, and "
                "windows of 8 tokens or more"
            )


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Text:
    """Windows of ids, and what enters the trained layers."""

    ids: Tensor
    """[windows, time]"""
    recorded: Tensor
    kinds: Tensor
    """[windows, time - 1] of the predicted tokens: 0 ordinary, 1 first, 2 repeated, 3 other."""

    def blocks(self, first: int = 0) -> Tensor:
        """[windows, time - 1] a number for each stretch of text."""
        count, length = self.ids.shape[0], self.ids.shape[1] - 1
        each = -(-length // estimates.BLOCK)
        number = torch.arange(count)[:, None] * each + torch.arange(length) // estimates.BLOCK
        return first + number


KINDS = ("text", "first", "repeated", "other")


class Study:
    """What all trainings of a study share."""

    def __init__(
        self, loaded: loading.Loaded, files: Sequence[Path], config: Config, directory: Path
    ) -> None:
        self.loaded, self.config, self.directory = loaded, config, directory
        self.tokenizer = loaded.tokenizer
        self.blocks = anatomy.examine(loaded).blocks
        self.plain = upgrade(loaded, "softmax")
        self.plain.requires_grad_(False)
        self.device = self.plain.device
        self.upper = UpperLayers(self.plain, self.blocks, config.layers)
        self.start = checkpoints.weights(self.upper.parameters())
        windows = collect.tokenise(
            self.tokenizer,
            files,
            tokens=_whole(config.judged_tokens, config.window)
            + _whole(config.epochs * self.steps * config.text_tokens, config.window),
            window=config.window,
            longest=anatomy.longest(loaded.model),
        )
        self.sources, self.sha256 = windows.sources, windows.sha256
        judged = max(1, -(-config.judged_tokens // windows.ids.shape[1]))
        if judged >= len(windows.ids):
            raise FullrankError(
                f"the text has {windows.ids.numel()} tokens, of which {config.judged_tokens} are to be "
                "judged and others trained on: give more --text or fewer --judged-tokens"
            )
        # The end is judged, so that what is trained on is the same whatever is judged.
        self.judged_ids = windows.ids[-judged:].to(self.device)
        self.training_ids = self._pieces(windows.ids[:-judged]).to(self.device)
        self.stories = names.stories(config.stories)
        self.of = checkpoints.digest(
            dataclasses.asdict(config) | {"methods": None, "seeds": None, "rates": None},
            [FORMAT, loaded.fingerprint, STORY, CALIBRATED, TEMPERATURES, WEIGHTS, MEMORY_RATE],
            windows.ids,
        )

    @property
    def steps(self) -> int:
        """Of an epoch."""
        return -(-self.config.train // self.config.batch)

    def prepare(self, progress: Callable[[float], None]) -> None:
        """Run the frozen layers over the texts that all seeds share."""
        self.upper.check(self.judged_ids[:1, :BODY_BATCH])
        plain = Text(
            ids=self.judged_ids,
            recorded=self._record(self.judged_ids, lambda share: progress(share / 3)),
            kinds=torch.zeros(len(self.judged_ids), self.judged_ids.shape[1] - 1, dtype=torch.long),
        )
        ids, kinds = self._stories()
        told = Text(ids=ids, recorded=self._record(ids, lambda share: progress((1 + share) / 3)), kinds=kinds)
        self.judged = (plain, told)
        self.training = self._record(self.training_ids, lambda share: progress((2 + share) / 3))
        self.memory = self._memory_starts()

    def prompts(self, seed: int, progress: Callable[[float], None]) -> dict[str, list[Batch]]:
        """The prompts of a seed's splits, by length."""
        drawn = self._drawn(seed)
        found: dict[str, list[Batch]] = {}
        for place, (name, chosen) in enumerate(
            zip(SPLITS, (drawn.train, drawn.one_overlap, drawn.no_overlap), strict=True)
        ):
            encoded = [template_task.encode(self.tokenizer, prompt) for prompt in chosen]
            lengths = template_task.by_length([one for one in encoded if one is not None])
            found[name] = [
                Batch(ids=ids, pieces=pieces, recorded=self._record(ids, lambda share: None))
                for ids, pieces in ((one.to(self.device), other.to(self.device)) for one, other in lengths)
            ]
            progress((place + 1) / len(SPLITS))
        return found

    def _drawn(self, seed: int) -> templates.Splits:
        return templates.splits(
            train=self.config.train,
            held_out=self.config.held_out,
            seed=seed,
            keep=lambda prompt: template_task.encode(self.tokenizer, prompt) is not None,
        )

    def head(self, method: str, seed: int) -> Head:
        """The output layer of a method, with the model's own matrix; the same distribution but for memory."""
        torch.manual_seed(seed)
        if method == "mos":
            return upgrade(self.loaded, "mos", components=self.config.components).lm_head.to(self.device)
        plain = self.plain.lm_head
        # A copy that shares W: a cache takes its base apart.
        base = copy.deepcopy(plain, {id(plain.decoder): plain.decoder})
        start = start_of(self.memory, method)
        return base if start is None else start.head(base).to(self.device)

    def restore(self) -> None:
        with torch.no_grad():
            for name, parameter in self.upper.parameters().items():
                parameter.copy_(self.start[name])

    def _pieces(self, ids: Tensor) -> Tensor:
        """Windows of the tokens of a step, from the same text."""
        length = min(self.config.text_tokens, ids.shape[1])
        return ids[:, : ids.shape[1] // length * length].reshape(-1, length)

    def _stories(self) -> tuple[Tensor, Tensor]:
        ids, kinds = [], []
        for story in self.stories:
            found = self.tokenizer(
                story.text, add_special_tokens=False, return_offsets_mapping=True, verbose=False
            )
            kind = torch.full((len(found["input_ids"]),), 3)
            for mention in story.mentions:
                for place, (begin, end) in enumerate(found["offset_mapping"]):
                    if begin < mention.end and end > mention.start:
                        kind[place] = 2 if mention.repeated else 1
            ids.append(found["input_ids"])
            kinds.append(kind)
        length = min(STORY, anatomy.longest(self.loaded.model) or STORY, *map(len, ids))
        return (
            torch.tensor([one[:length] for one in ids], device=self.device),
            torch.stack([kind[1:length] for kind in kinds]),
        )

    def _record(self, ids: Tensor, progress: Callable[[float], None]) -> Tensor:
        parts = []
        for place in range(0, len(ids), BODY_BATCH):
            with fast_products(self.device):
                parts.append(self.upper.record(ids[place : place + BODY_BATCH]))
            progress(min(1.0, (place + BODY_BATCH) / len(ids)))
        return torch.cat(parts) if parts else torch.empty(0)

    @torch.no_grad()
    def _memory_starts(self) -> dict[bool, MemoryStart]:
        """By products and by cosines, with the least loss of what is trained on: answers and text."""
        head = self.plain.lm_head
        if self.config.as_published:
            natural = math.sqrt(head.hidden)
            return {
                cosine: MemoryStart(temperature=natural, weight=0.0, cosine=cosine)
                for cosine in (False, True)
            }
        ids = self.training_ids[:CALIBRATED]
        states = self.upper.states(ids, self.training[:CALIBRATED])[:, :-1]
        text = Trained(states=states, context=ids[:, :-1], targets=ids[:, 1:])
        trained = [self._answered(), text]
        return {cosine: memory_start(head, trained, cosine=cosine) for cosine in (False, True)}

    def _answered(self) -> Trained:
        """The first seed's prompts to train on, each with either answer."""
        drawn = self._drawn(self.config.seeds[0]).train[:CALIBRATED]
        encoded = [template_task.encode(self.tokenizer, one) for one in drawn]
        rows = [(one.ids, answer) for one in encoded if one is not None for answer in one.answers]
        context = torch.full((len(rows), max(len(ids) for ids, _ in rows)), -1)
        targets = torch.full_like(context, -100)
        for row, (ids, answer) in enumerate(rows):
            context[row, : len(ids)] = torch.tensor(ids)
            targets[row, len(ids) - 1] = answer
        context, targets = context.to(self.device), targets.to(self.device)
        read = context.clamp_min(0)
        states = self.upper.states(read, self._record(read, lambda share: None))
        return Trained(states=states, context=context, targets=targets)


class Trained(NamedTuple):
    """Some of what is trained on."""

    states: Tensor
    """[n, time, H]"""
    context: Tensor
    """[n, time] the ids under them, negative where there is padding."""
    targets: Tensor
    """[n, time] those below 0 do not count."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryStart:
    """What a memory begins with."""

    temperature: float
    weight: float
    """Its logarithm."""
    cosine: bool
    """Whether scores are cosines."""

    def head(self, base: Head) -> CacheHead:
        return CacheHead(base, temperature=self.temperature, memory_weight=self.weight, cosine=self.cosine)


def start_of(memory: Mapping[bool, MemoryStart], method: str) -> MemoryStart | None:
    """What a method's memory begins with, by products or by cosines; None where it has none."""
    return memory[method in COSINE] if method in MEMORIES else None


def kept_as(of: str, name: str, start: MemoryStart | None) -> str:
    """What a training is kept under: what all share, its own name, and what its memory began with."""
    return f"{of} {name}" if start is None else f"{of} {name} {start}"


def _whole(tokens: int, window: int) -> int:
    """Tokens of as many windows as hold these."""
    return -(-tokens // window) * window


def losses_by_rate(rates: Sequence[float], loss: Callable[[float], float]) -> dict[float, float]:
    """The loss at every rate and, while the least stands at an end of several, beyond it; without those that
    diverge, of which there are some that do not."""
    found: dict[float, float] = {}
    last: DivergedError | None = None

    def ask(rate: float) -> None:
        nonlocal last
        try:
            found[rate] = loss(rate)
        except DivergedError as error:
            found[rate], last = math.inf, error

    for rate in sorted(rates):
        ask(rate)
    for _ in range(GROWTH if len(found) > 1 else 0):
        best = min(found, key=found.__getitem__)
        if best == min(found):
            ask(best / BEYOND)
        elif best == max(found):
            ask(best * BEYOND)
        else:
            break
    ended = {rate: value for rate, value in found.items() if math.isfinite(value)}
    if last is not None and not ended:
        raise last
    return ended


def cosine_note(start: MemoryStart) -> str:
    return (
        f"The memory of cosines has a temperature of {start.temperature:.1f} and begins with a log weight of "
        f"{start.weight:g}."
    )


@torch.no_grad()
def memory_start(head: Head, trained: Sequence[Trained], *, cosine: bool = False) -> MemoryStart:
    """Temperature and log weight with which a memory beside `head` has the least loss of what is trained on
    while it is open: the sum of mean losses, as training adds them."""
    natural = math.sqrt(head.hidden)
    losses: defaultdict[tuple[float, float], float] = defaultdict(float)
    shares: defaultdict[tuple[float, float], float] = defaultdict(float)
    for states, context, targets in trained:
        counted, held = targets >= 0, entry_tokens(context)
        score, normaliser = linear_logprob(
            states[counted],
            head.decoder.weight,
            targets[counted],
            bias=head.decoder.bias,
            pointwise=head.pointwise,
        )
        keys = of_one_length(states) if cosine else states
        for factor in TEMPERATURES:
            agreeing, every = (
                found[counted]
                for found in memory_logsumexp(keys / (factor * natural), keys, held, targets.clamp_min(-1))
            )
            for weight in WEIGHTS:
                joined = torch.logaddexp(normaliser, every + weight)
                loss = joined - torch.logaddexp(score, agreeing + weight)
                losses[factor, weight] += float(loss.mean())
                shares[factor, weight] += float((every + weight - joined).exp().mean()) / len(trained)
    # One that is closed is chosen where all are.
    factor, weight = min(losses, key=lambda start: (shares[start] < OPEN, losses[start]))
    return MemoryStart(temperature=factor * natural, weight=weight, cosine=cosine)
