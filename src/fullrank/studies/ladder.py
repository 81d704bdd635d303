"""The rank ladder: a language of known rank, softmax at widths around it, high-rank heads at the small width.

The language is C contexts over V tokens with logits H W^T of rank r, so that the least rank of its
log-probabilities is r by construction and a softmax of width r expresses it exactly. Every head reads the
same context embedding of width 32 (a free vector a context), sees the same sampled tokens for the same number
of AdamW steps, and differs in nothing but the map from that vector to a distribution. KL(truth || model) is
then computed exactly over all contexts, and compared with the lowest KL that `theory.factorise` finds for a
softmax of that width whose context vectors are free.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fullrank.errors import FullrankError
from fullrank.heads import Head, build
from fullrank.results import Ladder, LadderRung
from fullrank.results.reading import memory
from fullrank.theory import factorise, least_rank

Progress = Callable[[str, float], None]

HEADS = ("moc", "sigsoftmax", "plif", "mos", "trunk", "moss", "mixtape")
"""Heads that read one state and nothing else."""
EMBEDDING = 32
PEAK = 4.0
"""Standard deviation of the language's logits: peaked enough that every lost dimension shows."""
TOKENS_PER_CONTEXT = 4
LEARNING_RATE = 0.03
FLOOR_HOPS = 8
TABLES = 8
"""Tables of contexts by tokens in fp64 that live at once, at most."""


@dataclass(frozen=True, kw_only=True)
class Config:
    contexts: int
    vocabulary: int
    rank: int
    width: int
    components: int
    steps: int
    seed: int
    heads: tuple[str, ...]

    def __post_init__(self) -> None:
        for name in self.heads:
            if name not in HEADS:
                raise FullrankError(
                    f"--heads {name} does not climb this ladder: expected some of {', '.join(HEADS)}"
                )
        for name in ("contexts", "vocabulary", "rank", "width", "components", "steps"):
            if getattr(self, name) < 1:
                raise FullrankError(f"--{name} {getattr(self, name)} is impossible: expected at least 1")
        if 8 * TABLES * self.contexts * self.vocabulary > memory():
            raise FullrankError(
                f"--contexts {self.contexts} times --vocabulary {self.vocabulary} make tables beyond the "
                "memory of this machine: take fewer"
            )
        ceiling = min(self.contexts, self.vocabulary - 1)
        if self.rank > ceiling:
            raise FullrankError(
                f"--rank {self.rank} is impossible: {self.contexts} contexts over {self.vocabulary} tokens "
                f"have a least rank of at most {ceiling}"
            )
        if not self.width < self.rank:
            raise FullrankError(
                f"--width {self.width} holds no softmax back: expected a width below --rank {self.rank}"
            )


def language(config: Config) -> Tensor:
    """Log-probabilities [C, V] in fp64 whose least rank over the shift class is `config.rank`."""
    generator = torch.Generator().manual_seed(config.seed)
    H = torch.randn(config.contexts, config.rank, generator=generator, dtype=torch.float64)
    W = torch.randn(config.vocabulary, config.rank, generator=generator, dtype=torch.float64)
    return torch.log_softmax(PEAK * config.rank**-0.5 * (H @ W.t()), dim=1)


def rungs(config: Config) -> list[tuple[str, int, dict[str, int]]]:
    """Softmax below, halfway, at and above the rank, then what has more rank at the small width."""
    halfway = (config.width + config.rank) // 2
    widths = sorted({config.width, halfway, config.rank, config.rank + max(1, config.rank // 3)})
    mixture = {"components": config.components}
    options = dict.fromkeys(("moc", "mos", "moss", "mixtape"), mixture)
    options["trunk"] = {**mixture, "private": max(1, config.width // 2)}
    return [
        *(("softmax", width, {}) for width in widths),
        *((name, config.width, options.get(name, {})) for name in config.heads),
    ]


def run(config: Config, progress: Progress = lambda label, share: None) -> Ladder:
    """Climb the ladder; `progress` hears a label and the share done."""
    threads = torch.get_num_threads()
    # Operations this small wait longer for a second thread than it saves: a third of the time on two cores.
    torch.set_num_threads(1)
    try:
        return _climbed(config, progress)
    finally:
        torch.set_num_threads(threads)


def _climbed(config: Config, progress: Progress) -> Ladder:
    truth = language(config)
    plan = rungs(config)
    for name, width, options in plan:
        make_head(name, width, options, config)  # an impossible option shows before the work, not within it
    floors: dict[int, float] = {}
    done: list[LadderRung] = []
    for index, (name, width, options) in enumerate(plan):
        label = f"{name} width {width}"

        def report(share: float, label: str = label, index: int = index) -> None:
            progress(label, (index + share) / len(plan))

        report(0.0)
        if width not in floors:
            floors[width] = factorise(truth, width, hops=FLOOR_HOPS).loss
        done.append(climb(truth, name, width, options, config, floors[width], report))
    return Ladder(
        contexts=config.contexts,
        vocabulary=config.vocabulary,
        least_rank=least_rank(truth).rank,
        small_width=config.width,
        steps=config.steps,
        entropy=float(-(truth.exp() * truth).sum(1).mean()),
        rungs=tuple(done),
    )


def make_head(name: str, width: int, options: dict[str, int], config: Config) -> Head:
    return build(name, hidden=EMBEDDING, vocab=config.vocabulary, width=width, **options)


def climb(
    truth: Tensor,
    name: str,
    width: int,
    options: dict[str, int],
    config: Config,
    floor: float,
    report: Callable[[float], None],
) -> LadderRung:
    """Train one head and measure it against the truth."""
    started = time.perf_counter()
    torch.manual_seed(config.seed)
    embedding = nn.Embedding(config.contexts, EMBEDDING)
    head = make_head(name, width, options, config)
    train(truth, embedding, head, config, report)
    with torch.no_grad():
        learnt = head.double()(embedding.double().weight)
    return LadderRung(
        head=name,
        width=width,
        components=options.get("components", 1),
        parameters=sum(parameter.numel() for parameter in head.parameters()),
        least_rank=least_rank(learnt).rank,
        kl=float((truth.exp() * (truth - learnt)).sum(1).mean()),
        floor=floor,
        seconds=time.perf_counter() - started,
    )


def train(
    truth: Tensor, embedding: nn.Embedding, head: Head, config: Config, report: Callable[[float], None]
) -> None:
    """AdamW on freshly sampled tokens, a few for every context at every step, with a cosine decay."""
    parameters = [*embedding.parameters(), *head.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE, betas=(0.9, 0.99), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, config.steps)
    generator = torch.Generator().manual_seed(config.seed)
    probabilities = truth.exp()
    contexts = torch.arange(config.contexts).repeat_interleave(TOKENS_PER_CONTEXT)
    for step in range(config.steps):
        tokens = torch.multinomial(
            probabilities, TOKENS_PER_CONTEXT, replacement=True, generator=generator
        ).flatten()
        loss = head(embedding(contexts), tokens)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 20 == 0:
            report(step / config.steps)
