"""What the normaliser of attention is worth when it is trained with: one small transformer, each of them.

`transformer-tiny` is trained on the same text for the same number of steps with every normaliser of
`fullrank.models.normalisers` and every seed, all other settings those of the recipe, its learning rate among
them, which nobody tuned for any of them. One seed gives all normalisers the same first weights and batches. A
run is a directory of `fullrank train`, so a study that was stopped continues, and what is finished is kept.

After training, the attention of each is measured on windows of the validation text, at the queries that see
more than half of the context.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from fullrank.errors import FullrankError
from fullrank.models.attention import LEARNT, replace_normaliser
from fullrank.models.normalisers import NORMALISERS, check_available
from fullrank.results import Training, read_log
from fullrank.results.attention_study import REFERENCE, AttentionLayer, AttentionRun, AttentionStudy
from fullrank.theory.attention import Sets, entropy, random_ranks, top_ranks
from fullrank.train import config as settings
from fullrank.train.folder import Run, open_run
from fullrank.train.journal import Show
from fullrank.train.loop import Options, train
from fullrank.train.recipes import recipe

Progress = Callable[[str, float], None]

RECIPE = "transformer-tiny"
EVALUATIONS = 3
"""While training."""
WINDOWS, SET_SIZE = 16, 16
"""Windows that attention is measured on, and the size of its sets."""
OWN = ("body.normaliser", "seed")
"""Settings in which runs differ."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    normalisers: tuple[str, ...] = tuple(NORMALISERS)
    seeds: tuple[int, ...] = (0, 1, 2)
    steps: int = 300
    changes: tuple[str, ...] = ()
    """Other settings of the recipe, as `--set` takes them, the same in all runs."""

    def __post_init__(self) -> None:
        for name in self.normalisers:
            check_available(name)
        if REFERENCE not in self.normalisers or len(set(self.normalisers)) < len(self.normalisers):
            raise FullrankError(
                f"the normalisers are {', '.join(self.normalisers) or 'none'}: expected different ones, "
                f"{REFERENCE} among them, which the others are compared with"
            )
        if not self.seeds or len(set(self.seeds)) < len(self.seeds):
            raise FullrankError(
                f"the seeds are {', '.join(map(str, self.seeds)) or 'none'}: expected different ones"
            )
        if self.steps < 1:
            raise FullrankError(f"steps={self.steps} is impossible: expected at least 1")
        for change in self.changes:
            if change.partition("=")[0].strip() in (*OWN, "steps"):
                raise FullrankError(f"--set {change} is the study's own: use its options")

    def of(self, name: str, seed: int) -> settings.Config:
        """The config of one run."""
        every = max(1, self.steps // EVALUATIONS)
        own = (f"steps={self.steps}", f"evaluate_every={every}", f"body.normaliser={name}", f"seed={seed}")
        return settings.override(recipe(RECIPE), (*own, *self.changes))


class Stopped(Exception):  # noqa: N818 - it is no error
    """A signal came; the run of it is saved."""

    def __init__(self, signal: int | None) -> None:
        super().__init__("stopped")
        self.signal = signal


def run(
    data: tuple[Path, ...],
    out: Path,
    config: Config,
    *,
    cache: Path,
    device: str = "auto",
    progress: Progress = lambda stage, share: None,
    say: Callable[[str], None] = lambda message: None,
) -> AttentionStudy:
    """Train or continue every run under `out`/runs, then measure; raises Stopped where a signal came.

    Seed by seed, so that a study cut short has whole seeds.
    """
    jobs = [(name, seed) for seed in config.seeds for name in config.normalisers]
    for name, seed in jobs:
        config.of(name, seed)  # a setting that is impossible shows before the first run
    done: dict[tuple[str, int], tuple[AttentionRun, Training]] = {}
    for number, (name, seed) in enumerate(jobs):
        place = out / "runs" / f"{name}-seed{seed}"
        show = _Shown(f"{name}, seed {seed}", number, len(jobs), progress, say)
        options = Options(data=data, out=place, cache=cache, device=device, trackers=(), monitors=False)
        failure = ""
        try:
            outcome = train(config.of(name, seed), options, show)
        except FullrankError as error:
            if not _diverged(place):
                raise
            failure = str(error)
        else:
            if outcome.reason == "stopped":
                raise Stopped(outcome.signal)
        log = read_log(place)
        done[name, seed] = (_run(name, seed, place, log, failure), log)
        say(_line(done[name, seed][0]))
    runs = tuple(done[name, seed][0] for name in config.normalisers for seed in config.seeds)
    return _study(config, runs, [log for _, log in done.values()], done[jobs[0]][1])


class _Shown(Show):
    """One run's part of the study's bar."""

    def __init__(
        self, label: str, number: int, total: int, progress: Progress, say: Callable[[str], None]
    ) -> None:
        self.label, self.number, self.total = label, number, total
        self.progress, self.tell = progress, say

    def say(self, message: str) -> None:
        self.tell(message)

    def reading(self, label: str, share: float) -> None:
        self.progress(f"{self.label}: {label}", self.number / self.total)

    def step(self, done: int, total: int, loss: float, tokens_per_second: float) -> None:
        words = f"{self.label}: loss {loss:.3f}, {tokens_per_second:,.0f} tokens/s"
        self.progress(words, (self.number + done / total) / self.total)


def _diverged(place: Path) -> bool:
    """Whether the run there ended because its numbers were no longer finite."""
    try:
        return read_log(place).reason == "nan"
    except FullrankError:
        return False


def _line(run: AttentionRun) -> str:
    if run.valid is None:
        return f"{run.normaliser:<11} seed {run.seed}  failed: {run.failure}"
    return f"{run.normaliser:<11} seed {run.seed}  valid {run.valid.value:.4f} nats"


def _run(name: str, seed: int, place: Path, log: Training, failure: str) -> AttentionRun:
    validation = [one for one in log.evaluations if one.split == "valid"]
    return AttentionRun(
        normaliser=name,
        seed=seed,
        parameters=log.parameters,
        steps=tuple(one.step for one in validation),
        losses=tuple(one.loss for one in validation),
        valid=None if failure else log.valid,
        test=None if failure else log.test,
        seconds=log.seconds_training,
        layers=() if failure else measure(open_run(place)),
        failure=failure,
    )


@torch.no_grad()
def measure(run: Run) -> tuple[AttentionLayer, ...]:
    """The attention of a run's best weights on the beginning of its validation text."""
    length, tokens = run.config.length, run.corpus.splits["valid"].tokens
    windows = min(WINDOWS, len(tokens) // length)
    if not windows:
        raise FullrankError(
            f"the validation text has {len(tokens)} tokens, expected at least {length}: give more text"
        )
    ids = torch.from_numpy(tokens[: windows * length].astype("int64")).reshape(windows, length)
    generator = torch.Generator().manual_seed(run.config.seed)
    found: dict[int, AttentionLayer] = {}

    def observe(layer: nn.Module, scores: Tensor, visible: Tensor, weights: Tensor, values: Tensor) -> None:
        late = slice(length // 2, None)
        seen, used = visible[:, :, late], weights[:, :, late].double()
        learnt = getattr(layer, LEARNT, None)
        shares = _separable(seen, used, values, generator)
        found[len(found)] = AttentionLayer(
            # A query whose weights are all zero, as sigmoid may have, attends to nothing.
            effective_tokens=float(entropy(used).exp().nan_to_num(0.0).mean()),
            first_mass=float(used[..., 0].mean()),
            mass=float(used.sum(-1).mean()),
            zeros=float(((used == 0) & seen).sum() / seen.sum()),
            separable=shares[0],
            separable_random=shares[1],
            learnt=() if learnt is None else tuple(learnt.double().tolist()),
        )

    with replace_normaliser(run.model.model, run.config.body.normaliser, observe=observe, check=False):
        run.model.model(ids)
    return tuple(found.values())


def _separable(
    seen: Tensor, weights: Tensor, values: Tensor, generator: torch.Generator
) -> tuple[float, float]:
    """The separable share of the top and of a random set of each query."""
    size = min(SET_SIZE, int(seen.sum(-1).min()) - 1)
    if size < 1:
        return float("nan"), float("nan")
    sets = Sets(weights, values, seen)
    orders = (top_ranks(weights, seen), random_ranks(seen, generator))
    top, drawn = (float(sets.separation(one, [size]).recall.mean()) for one in orders)
    return top, drawn


def _study(
    config: Config, runs: tuple[AttentionRun, ...], logs: list[Training], first: Training
) -> AttentionStudy:
    one = config.of(config.normalisers[0], config.seeds[0])
    finals = [evaluation.counted for evaluation in first.evaluations if evaluation.split == "test"]
    windows = min(WINDOWS, int(first.data["splits.valid.tokens"]) // one.length)
    return AttentionStudy(
        recipe=RECIPE,
        config={name: value for name, value in first.config.items() if name not in OWN},
        data=first.data,
        vocabulary=first.vocabulary,
        context=one.length,
        training_steps=config.steps,
        training_tokens=max(point.tokens for log in logs for point in log.points),
        evaluated_tokens=finals[-1] if finals else 0,
        queries=windows * (one.length - one.length // 2),
        set_size=min(SET_SIZE, one.length // 2),
        device=first.device,
        runs=runs,
    )
