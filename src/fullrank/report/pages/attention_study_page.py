"""The page of `fullrank study attention`: each normaliser's loss against softmax, and what its heads do."""

from __future__ import annotations

import statistics
from collections.abc import Callable

from fullrank.report.charts.axis import Axis
from fullrank.report.charts.intervals import Intervals, Mark
from fullrank.report.charts.theme import HIGH_RANK_COLOUR, MUTED, REFERENCE, Key
from fullrank.report.figures import Cell, figure, with_interval
from fullrank.report.page import Column, Page, Section, Table, draw
from fullrank.report.text import shown
from fullrank.results.attention_study import REFERENCE as SOFTMAX
from fullrank.results.attention_study import AttentionLayer, AttentionStudy, Compared

LABELS = {
    "softmax": "softmax",
    "sparsemax": "sparsemax",
    "entmax15": "1.5-entmax",
    "sink": "softmax with a sink",
    "log_length": "scaled by log length",
    "sigmoid": "sigmoid",
}
"""What a reader sees."""


def attention_study_page(record: AttentionStudy) -> Page:
    """The page of the trained comparison."""
    return Page(
        title="Trained normalisers of attention",
        lead=(
            f"The recipe {shown(record.recipe)} trained on one text for {record.training_steps:,} steps with "
            f"each of {len(record.names())} functions that turn attention scores into weights, over "
            f"{max(len(record.of(name)) for name in record.names())} seeds."
        ),
        sections=(
            _against_softmax(record),
            _losses(record),
            _heads(record),
            _learnt(record),
            _setting(record),
            _reading(record),
        ),
        warnings=_warnings(record),
    )


def verdict(row: Compared) -> str:
    """What the interval of a difference allows to say."""
    if row.difference is None:
        return "reference" if row.normaliser == SOFTMAX else "not compared"
    if row.difference.low > 0:
        return "worse"
    return "better" if row.difference.high < 0 else "not told apart"


def label(name: str) -> str:
    return LABELS.get(name, shown(name))


def differences(record: AttentionStudy) -> Intervals:
    """Each normaliser's loss minus that of softmax: a dot with its interval, and a tick a seed."""
    rows, marks, figures = [], [], []
    beside = {run.seed: run.valid.value for run in record.of(SOFTMAX) if run.valid is not None}
    for row in record.compared():
        if row.difference is None:
            continue
        name = label(row.normaliser)
        rows.append(name)
        figures.append(figure(row.difference))
        words = f"{name}: {with_interval(row.difference)} nats per token"
        marks.append(
            Mark(
                row=name, model="mean", value=row.difference.value, low=row.difference.low,
                high=row.difference.high, colour=HIGH_RANK_COLOUR, summary=words,
            )
        )  # fmt: skip
        for run in record.of(row.normaliser):
            if run.valid is not None and run.seed in beside:
                value = run.valid.value - beside[run.seed]
                words = f"{name}, seed {run.seed}: {figure(value)} nats per token"
                marks.append(
                    Mark(row=name, model="seed", value=value, colour=MUTED, shape="tick", summary=words)
                )
    return Intervals(
        x=Axis(title="validation loss minus that of softmax, nats per token"),
        rows=tuple(rows),
        marks=tuple(marks),
        models=("mean", "seed"),
        figures=tuple(figures),
        lines=(0.0,),
        legend=(
            Key(label="mean over seeds, 95% interval", colour=HIGH_RANK_COLOUR, mark="dot"),
            Key(label="one seed", colour=MUTED, mark="tick"),
            Key(label="softmax", colour=REFERENCE, mark="line"),
        ),
    )


def _against_softmax(record: AttentionStudy) -> Section:
    picture = differences(record)
    chart = None
    if picture.rows and picture.drawable():
        chart = draw(
            lambda *, width: picture.specification(width=width),
            name="Validation loss minus that of softmax, nats per token",
            description="One row a normaliser. All figures are in the table below.",
            legend=picture.legend,
        )
    return Section(
        title="Loss against softmax",
        text=(
            "Runs of one seed begin with the same weights and see the same batches, so each seed is compared "
            "with softmax of that seed. Further left is a lower loss.",
        ),
        chart=chart,
        table=Table(
            caption="Nats per token on the validation text, with the best weights of each run.",
            columns=(
                Column(name="normaliser"),
                Column(name="seeds"),
                Column(name="loss", unit="mean"),
                Column(name="spread", unit="over seeds"),
                Column(name="test loss", unit="mean"),
                Column(name="minus softmax", unit="95% interval"),
                Column(name="at this budget"),
            ),
            rows=tuple(
                (
                    label(row.normaliser), row.seeds, row.valid, row.spread, row.test, row.difference,
                    verdict(row),
                )
                for row in record.compared()
            ),
        ),
    )  # fmt: skip


def _losses(record: AttentionStudy) -> Section:
    return Section(
        title="Every run",
        table=Table(
            caption=(
                "One row a run. Intervals are over the tokens of the text, which all runs share. While "
                "training, the loss is taken over fewer tokens."
            ),
            columns=(
                Column(name="normaliser"),
                Column(name="seed"),
                Column(name="validation", unit="nats per token"),
                Column(name="test", unit="nats per token"),
                Column(name="while training"),
                Column(name="parameters"),
                Column(name="training", unit="seconds"),
            ),
            rows=tuple(
                (
                    label(run.normaliser), run.seed, run.valid, run.test,
                    ", ".join(f"{loss:.3f}" for loss in run.losses), run.parameters, run.seconds,
                )
                for run in record.runs
            ),
            folded="All runs",
        ),
    )  # fmt: skip


def _heads(record: AttentionStudy) -> Section:
    kinds: tuple[tuple[str, str, Callable[[AttentionLayer], float]], ...] = (
        ("effective number of tokens", "", lambda one: one.effective_tokens),
        ("on the first position", "of the mass", lambda one: one.first_mass),
        ("sum of weights", "", lambda one: one.mass),
        ("weights of zero", "share", lambda one: one.zeros),
        ("separable", "top set", lambda one: one.separable),
        ("separable", "random set", lambda one: one.separable_random),
    )
    rows: list[tuple[Cell, ...]] = []
    for name in record.names():
        finished = [run for run in record.of(name) if run.layers]
        depth = max((len(run.layers) for run in finished), default=0)
        for layer in range(depth):
            cells = [statistics.fmean(read(run.layers[layer]) for run in finished) for _, _, read in kinds]
            rows.append((label(name), layer + 1, *cells))
    return Section(
        title="What the heads do",
        text=(
            f"Means over heads, seeds and {record.queries:,} queries of the validation text, each of which "
            f"sees more than half of the {record.context:,} tokens of context. Sets have {record.set_size} "
            "positions.",
        ),
        table=Table(
            caption="One row a normaliser and layer, the first layer being the one above the embedding.",
            columns=(
                Column(name="normaliser"),
                Column(name="layer"),
                *(Column(name=name, unit=unit) for name, unit, _ in kinds),
            ),
            rows=tuple(rows),
        ),
        definition=(
            "The effective number of tokens is exp of the entropy of a query’s weights, taken as shares of "
            "their sum.",
            "The separable share of a set of N positions is the share of them whose weighted value lies "
            "nearer to the set’s sum than that of every position outside. A random set is its control.",
        ),
    )


def _learnt(record: AttentionStudy) -> Section:
    rows: list[tuple[Cell, ...]] = []
    for run in record.runs:
        for number, layer in enumerate(run.layers):
            if layer.learnt:
                values = ", ".join(f"{value:.3f}" for value in layer.learnt)
                rows.append((label(run.normaliser), run.seed, number + 1, values))
    if not rows:
        return Section(title="What was learnt", text=("No normaliser here has a parameter.",))
    return Section(
        title="What was learnt",
        text=("The logit of the sink, which starts at 0, and the factor on log n, one number a head.",),
        table=Table(
            caption="One row a run and layer.",
            columns=(
                Column(name="normaliser"),
                Column(name="seed"),
                Column(name="layer"),
                Column(name="by head"),
            ),
            rows=tuple(rows),
            folded="All heads",
        ),
    )


def _setting(record: AttentionStudy) -> Section:
    return Section(
        title="The budget",
        table=Table(
            caption="The same for all runs.",
            columns=(Column(name="quantity"), Column(name="value")),
            rows=(
                ("recipe", shown(record.recipe)),
                ("steps", record.training_steps),
                ("tokens trained on", record.training_tokens),
                ("tokens of context", record.context),
                ("vocabulary", record.vocabulary),
                ("tokens of the final validation", record.evaluated_tokens),
                ("device", shown(record.device)),
            ),
        ),
        more_tables=(
            Table(
                caption="Every setting that the runs share.",
                columns=(Column(name="setting"), Column(name="value")),
                rows=tuple((shown(name), shown(value)) for name, value in record.config.items()),
                folded="All settings",
            ),
        ),
    )


def _reading(record: AttentionStudy) -> Section:
    compared = sum(row.difference is not None for row in record.compared())
    return Section(
        title="How to read this",
        text=(
            "The learning rate and all else are the recipe’s, chosen with softmax, and nobody tuned them for "
            "the others: a normaliser that does worse here may only want other settings.",
            f"{record.training_tokens:,} tokens are far from convergence, and {record.context:,} tokens of "
            "context are few: what is said of sinks, sparsity and scaling by length concerns longer ones.",
            "An interval over so few seeds is wide. Where it includes 0, the runs do not tell the normaliser "
            "from softmax, which is no proof that both are equal.",
            f"With {compared} comparisons of 95% each, and no difference anywhere, at least one interval "
            f"would miss 0 in up to {min(5 * compared, 100)}% of such studies.",
        ),
    )


def _warnings(record: AttentionStudy) -> tuple[str, ...]:
    return tuple(
        f"{label(run.normaliser)}, seed {run.seed}, did not finish: {shown(run.failure)}"
        for run in record.runs
        if run.failure
    )
