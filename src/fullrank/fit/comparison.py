"""Heads with their controls, fitted on the states of a frozen body until they are fitted.

    refit     the model's own output layer, fitted to the text: W and a map of all rows. What it gains is the
              text's and not a head's, so everything below starts from it and is measured against it
    split     directions in which splitting its rows gains (`splitting`), which mixtures start along
    controls  softmax           the refitted layer, trained on as the heads are
              softmax_equal     the same with as many parameters as the largest head
    heads     any number; each starts as the refitted layer

All have the same tokens, the same rows of W, the same way to their learning rates and stopping points. The
text is in three parts: to fit on, to choose on, and to judge on. A gain is the best control's loss minus the
head's, token by token on the last part; the output layer as it came is a control too. Heads are ranked on
the text for choosing, so that the gain of the best is no best of many draws.

With a teacher (`teacher`) all of it, the refit, the split, controls and heads, is on KL(teacher || head) in
place of the loss, and so is the gain; losses are judged beside it.
"""

from __future__ import annotations

import copy
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from torch import Tensor, nn

from fullrank.fit import estimates, loop, sampling, split_heads, split_training, splitting, trainee, training
from fullrank.fit import setting as ready
from fullrank.fit.controls import CONTROLS, controls, size
from fullrank.fit.states import Parts
from fullrank.fit.teacher import Teacher, check_students
from fullrank.heads import HEADS, Head
from fullrank.heads.mixture import MixtureHead
from fullrank.heads.rows import RowHead
from fullrank.results import Estimate

Progress = Callable[[str, float], None]

SMALL_VOCABULARY = 4096
"""Up to here the exact loss costs no more than the estimated one."""
ORIGINAL = "original"
"""The output layer as it came, among the controls."""
PER_SCORE = 500
"""What normalising a score and its gradient cost on a processor, in multiplications."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """How much work fits do."""

    tokens: int = 16384
    """Tokens of text to run the body on."""
    window: int = 512
    """Tokens a window: the longest context."""
    memory: int = 2 << 30
    """Bytes that states and buffers may take beside the model."""
    seeds: int = 2
    """Fits of the best head and its control; the others have one."""
    rates: tuple[float, ...] = (0.03, 0.12, 0.5)
    """Learning rates to begin with: the pace relative to the width."""
    epochs: int = 60
    """Passes over the text, at most."""
    work: float = 5e12
    """Multiplications and the like that one fit may take on a processor; a GPU does a thousand times that."""
    patience: int = 3
    """Looks at the text for choosing after which a curve counts as flat."""
    tolerance: float = 3e-4
    """Nats per token that these must bring together, or it is flat."""
    rows: int = sampling.ROWS
    """Rows of W that are trained where not all are; more if the text has more distinct tokens."""
    exact: bool | None = None
    """Whether to train on the exact loss; None decides by device, vocabulary and head."""
    matrix: bool = True
    """Whether W is trained. A tied W then leaves the input embedding, which stays as it is."""
    seed: int = 0
    align: float = 0.0
    """Weight of HistAlign's ranking loss in the training of a cache head."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Gain:
    """What a head gains over the best of its controls."""

    control: str
    mean: Estimate
    by_seed: tuple[float, ...]


def gain_over(
    values: Callable[[str], Sequence[Tensor]], head: str, controls: Sequence[str], blocks: Tensor
) -> Gain:
    """Of values [held-out tokens], one tensor a seed, by name: the lower the better. Whichever control did
    best where it counts: a head must beat them all."""
    control = min(controls, key=lambda name: _mean(values(name)))
    differences = paired(values(control), values(head))
    by_seed = tuple(float(one.double().mean()) for one in differences)
    return Gain(control=control, mean=estimates.mean_over_seeds(differences, blocks), by_seed=by_seed)


def paired(control: Sequence[Tensor], head: Sequence[Tensor]) -> list[Tensor]:
    """[held-out tokens] gains, one a seed of the head."""
    return [control[seed % len(control)] - one for seed, one in enumerate(head)]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Comparison:
    """Heads and controls after their fits."""

    setting: ready.Setting
    """With the refitted layer for its plain head."""
    original: Tensor
    """[held-out tokens] nats of the output layer as it came."""
    refit: training.Fitted | None
    """None where W was not to be trained."""
    heads: dict[str, Head]
    """Controls and heads as their fits began, in their order."""
    fits: dict[str, list[training.Fitted]]
    """A fit a seed."""
    weights: dict[str, dict[str, Tensor]]
    """Of the heads: the best seed's, for `Trainee.load`."""
    directions: splitting.Directions | None
    """None where no mixture was fitted."""
    split_gain: Estimate | None
    """Nats per token that the leading directions gain over the refitted layer, untrained."""
    seconds: dict[str, float]
    original_divergences: Tensor | None = None
    """[held-out tokens] KL of the output layer as it came from the teacher; None without one."""

    @property
    def blocks(self) -> Tensor:
        return self.setting.parts.held_out.blocks.flatten()

    @property
    def best(self) -> str:
        """The head with the lowest loss on the text for choosing."""
        high = [name for name in self.fits if name not in CONTROLS]
        return min(high, key=lambda name: self.fits[name][0].choose_loss)

    @property
    def control(self) -> str:
        return self.gain_over_best(self.best).control

    def losses(self, name: str) -> list[Tensor]:
        return [self.original] if name == ORIGINAL else [one.losses for one in self.fits[name]]

    def divergences(self, name: str) -> list[Tensor]:
        """From the teacher; none without one."""
        fits = self.fits.get(name, [])
        found = [self.original_divergences] if name == ORIGINAL else [one.divergences for one in fits]
        return [one for one in found if one is not None]

    def judged(self, name: str) -> list[Tensor]:
        """What the fits were to bring down."""
        return self.divergences(name) or self.losses(name)

    def gain_over_best(self, name: str, values: Callable[[str], Sequence[Tensor]] | None = None) -> Gain:
        """Over the best control, of what the fits were to bring down where no other values are named."""
        return gain_over(values or self.judged, name, (*CONTROLS, ORIGINAL), self.blocks)

    def gain(self, name: str, over: str | None = None) -> Estimate:
        """What a head gains over a control, the best one where none is named."""
        return estimates.mean_over_seeds(self.differences(name, over or self.control), self.blocks)

    def differences(self, name: str, over: str) -> list[Tensor]:
        return paired(self.judged(over), self.judged(name))

    def fitted(self, name: str) -> trainee.Trainee:
        """A head with its best seed's weights."""
        found = trainee.Trainee(self.heads[name], self.setting, 0)
        found.to(self.setting.parts.held_out.targets.device).load(self.weights[name])
        return found


def candidates() -> tuple[str, ...]:
    """Heads that are worth trying and rows over one matrix."""
    return tuple(name for name, head in HEADS.items() if head.worth_trying and head.splits)


def _mean(losses: Sequence[Tensor]) -> float:
    return sum(float(one.double().mean()) for one in losses) / len(losses)


def setting_for(
    heads: Sequence[Head], plain: Head, parts: Parts, settings: Settings, teacher: Teacher | None = None
) -> ready.Setting:
    """The text ready to train these heads on, or what a teacher says of it."""
    exact, rows = settings.exact, settings.rows
    if teacher is not None:
        check_students(heads)
    small = plain.vocab <= SMALL_VOCABULARY
    if exact is None and teacher is not None and not teacher.is_rows:
        # Asked once, in whole windows, and what it said is kept.
        exact, rows = False, plain.vocab if small else rows
    if exact is None:
        device = plain.decoder.weight.device
        exact = device.type != "cpu" or small or not all(isinstance(head, RowHead) for head in heads)
    return ready.prepare(
        plain,
        parts,
        rows=rows,
        exact=exact,
        matrix=settings.matrix,
        # A quarter of the memory for one V-wide buffer: there are up to three, and the states.
        limit=settings.memory // 4,
        seed=settings.seed,
        align=settings.align,
        teacher=teacher,
    )


def compare(
    setting: ready.Setting,
    heads: Callable[[int], Mapping[str, Head]] | Mapping[str, Head],
    *,
    settings: Settings,
    directory: Path | None = None,
    progress: Progress = lambda stage, share: None,
) -> Comparison:
    """Fit the controls and the heads, which may be made for the number of directions in which splitting the
    rows surely helps. In `directory` trainings are kept, and the same call after a crash goes on from there;
    the caller removes it."""
    seconds: dict[str, float] = {}
    count = len(heads(0) if callable(heads) else heads)
    jobs = 2 + len(CONTROLS) + count + 2 * (settings.seeds - 1)
    done = 0

    def fit(
        setting: ready.Setting, name: str, head: Head, seed: int = 0, rate: float | None = None
    ) -> tuple[training.Fitted, dict[str, Tensor]]:
        nonlocal done
        begun = time.monotonic()
        plan = plan_for(setting, head, settings)
        if rate is not None:
            # One seed races the learning rates, the others take its choice.
            plan = dataclasses.replace(plan, rates=(rate,))
        where = None if directory is None else directory / name / f"seed{settings.seed + seed}.safetensors"
        found = training.train_in_turn(
            setting, head, plan, seed=settings.seed + seed, file=where,
            progress=lambda share: progress(f"fitting {name}", (done + share) / jobs),
        )  # fmt: skip
        seconds[name] = seconds.get(name, 0.0) + time.monotonic() - begun
        done += 1
        return found

    plain, held_out = setting.plain, setting.parts.held_out
    start = trainee.Trainee(plain, setting, 0).to(held_out.targets.device)
    original, divergences = start.exact_losses(held_out), start.exact_divergences()
    del start
    refitted: training.Fitted | None = None
    if setting.matrix:
        refitted, weights = fit(setting, "refit", plain)
        setting = rebased_setting(setting, weights, refitted.rate)
    else:
        done += 1
    begun = time.monotonic()
    started_heads, directions, split_gain = started(
        setting,
        heads,
        settings,
        lambda share: progress("splitting the rows", (done + share) / jobs),
        directory,
    )
    seconds["splitting"] = time.monotonic() - begun
    done += 1
    largest = max(started_heads.values(), key=size)
    every = {**controls(largest, setting.plain), **started_heads}
    fits: dict[str, list[training.Fitted]] = {}
    best_weights: dict[str, dict[str, Tensor]] = {}
    for name, head in every.items():
        found, weights = fit(setting, name, head)
        fits[name] = [found]
        if name not in CONTROLS:
            best_weights[name] = weights
    made = Comparison(
        setting=setting, original=original, refit=refitted, heads=every, fits=fits, weights=best_weights,
        directions=directions, split_gain=split_gain, seconds=seconds, original_divergences=divergences,
    )  # fmt: skip
    again = [made.best] + ([made.control] if made.control != ORIGINAL else [])
    for name in again:
        for seed in range(1, settings.seeds):
            found, weights = fit(setting, name, every[name], seed, fits[name][0].rate)
            if name == made.best and found.choose_loss < min(one.choose_loss for one in fits[name]):
                best_weights[name] = weights
            fits[name].append(found)
    progress("fitting", 1.0)
    return made


def plan_for(setting: ready.Setting, head: Head, settings: Settings) -> loop.Plan:
    """As many passes as the work allows, and three at the least."""
    rows = setting.plain.vocab if setting.sampled is None else len(setting.sampled[0].rows) + sampling.DRAWN
    rows *= getattr(head, "components", 1)
    each = rows * cost_of_score(head.width) + 6 * size(head)
    if setting.teacher is not None and setting.sampled is None:
        # It is scored at every step.
        each += setting.plain.vocab * (2 * setting.teacher.head.width + PER_SCORE)
    # The race is part of it.
    passes = int(_work(setting, settings) / (each * len(setting.parts.fit))) - len(settings.rates)
    return loop.Plan(
        rates=settings.rates,
        epochs=max(training.LEAST_EPOCHS, min(settings.epochs, passes)),
        patience=settings.patience,
        tolerance=settings.tolerance,
    )


def cost_of_score(width: int) -> int:
    """Multiplications and the like for one score of a token, its gradients with it."""
    return 6 * width + PER_SCORE


def affordable(vocab: int, width: int, components: int, work: float) -> int:
    """Tokens to fit on that leave this work on a processor enough for the least passes of both parts of a
    mixture's fit, and for its race, where every score is made."""
    return int(work / ((2 * training.LEAST_EPOCHS + 1) * components * vocab * cost_of_score(width)))


def _work(setting: ready.Setting, settings: Settings) -> float:
    """Of one fit: a GPU does a thousand times what a processor does."""
    return settings.work * (1 if setting.parts.fit.targets.device.type == "cpu" else 1000)


def rebased_setting(setting: ready.Setting, weights: dict[str, Tensor], rate: float) -> ready.Setting:
    """The same text with the refitted layer for the plain head, and the rate that its W wants."""
    fitted = trainee.Trainee(setting.plain, setting, 0)
    fitted.to(setting.parts.fit.targets.device).load(weights)
    plain = copy.deepcopy(setting.plain)
    fitted.into(plain)
    plain.requires_grad_(False)
    return dataclasses.replace(setting, plain=plain, matrix_rate=rate)


def rebased(head: Head, plain: Head) -> Head:
    """A head over a plain head's matrix and bias, what it owns as it is."""
    weight, bias = head.decoder.weight, head.decoder.bias
    found = copy.deepcopy(head, {id(weight): weight})
    found.decoder.weight = plain.decoder.weight
    if bias is not None and plain.decoder.bias is not None:
        # What a function that is not blind to it has added to all scores stays.
        lifted = (bias - plain.decoder.bias).mean() if head.pointwise is not plain.pointwise else 0.0
        found.decoder.bias = nn.Parameter((plain.decoder.bias + lifted).detach())
    return found


def splits(head: Head) -> bool:
    """Whether a head's components can be moved apart."""
    return (
        isinstance(head, MixtureHead)
        and head.components > 1
        and len(head.contexts.counts) == 1
        and not head.contexts.as_published
    )


def started(
    setting: ready.Setting,
    heads: Callable[[int], Mapping[str, Head]] | Mapping[str, Head],
    settings: Settings,
    progress: Callable[[float], None],
    directory: Path | None = None,
) -> tuple[dict[str, Head], splitting.Directions | None, Estimate | None]:
    """The heads over the refitted layer, mixtures with their components apart where that begins better; the
    directions, and what they gain by themselves on the text for choosing."""
    whole: splitting.Directions | None = None
    if callable(heads) or any(splits(head) for head in heads.values()):
        # Two passes over W a token, and half of what a fit may take.
        each = setting.plain.vocab * (4 * setting.plain.width + PER_SCORE // 4)
        tokens = int(_work(setting, settings) / 2 / each)
        gathered = splitting.gather(
            setting, tokens=tokens, seed=settings.seed, progress=lambda share: progress(0.7 * share)
        )
        whole = splitting.search(gathered, seed=settings.seed)
    if callable(heads):
        assert whole is not None
        heads = heads(whole.sure)
    based = {name: rebased(head, setting.plain) for name, head in heads.items()}
    gain: Estimate | None = None
    for place, (name, head) in enumerate(based.items()):
        if whole is None or not splits(head):
            continue
        assert isinstance(head, MixtureHead)
        own = head.contexts.private
        directions = whole if own == head.width else splitting.search(gathered, own=own, seed=settings.seed)
        stepped, scale, gained = split_heads.apart(setting, head, directions)
        gain = gained if gain is None and scale else gain
        where = None if directory is None else directory / name / f"split{settings.seed}.safetensors"
        both = (
            stepped,
            split_training.trained(setting, head, directions, scale, seed=settings.seed, file=where),
        )
        based[name] = min(both, key=lambda one: float(split_heads.choose_losses(setting, one).mean()))
        progress(0.7 + 0.3 * (place + 1) / len(based))
    return based, whole, gain
