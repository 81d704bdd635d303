"""The page of `fullrank study histalign`: completions of ambiguous prompts, and what they cost elsewhere."""

from __future__ import annotations

import statistics

from fullrank.report.charts.axis import Axis
from fullrank.report.charts.intervals import Intervals, Mark
from fullrank.report.charts.theme import HIGH_RANK_COLOUR, MUTED, REFERENCE, Key
from fullrank.report.figures import Cell, figure, with_interval
from fullrank.report.page import Column, Page, Section, Table, draw
from fullrank.report.text import shown
from fullrank.results.histalign import TemplateMethod, Templates

LABELS = {
    "base": "not trained",
    "cache": "memory, not trained",
    "softmax": "softmax, trained",
    "trime": "TRIME",
    "histalign": "HistAlign",
    "histalign_sum": "HistAlign, pairs summed",
    "mos": "mixture of softmaxes",
    "histalign_cosine": "HistAlign, by cosines",
    "trime_uncredited": "TRIME, prompts not credited",
    "histalign_uncredited": "HistAlign, prompts not credited",
}
"""What a reader sees."""
SPLITS = ("no overlap", "one overlap", "train")
TOKENS = {
    "text": "ordinary text",
    "first": "names, first occurrence",
    "repeated": "names, repeated",
    "other": "beside names",
}


def templates_page(record: Templates) -> Page:
    """The page of the study."""
    return Page(
        title=f"Ambiguous templates on {shown(record.model)}",
        lead=(
            "Prompts that two words complete equally well, where the two lie across a parallelogram from two "
            f"others. The last {record.layers} layers are trained in several ways over "
            f"{len(record.seeds)} seeds; everything else is frozen."
        ),
        sections=(_completions(record), _costs(record), _rank(record), _setting(record), _reading(record)),
    )


def completions(record: Templates) -> Intervals:
    """Acc@2 without overlap by method: the mean over seeds, and a tick a seed."""
    marks, figures = [], []
    for method in record.methods:
        shares = [100 * share for share in method.accuracy("no overlap", "full").top["2"]]
        mean = statistics.fmean(shares)
        name = LABELS.get(method.method, shown(method.method))
        words = f"{name}: {figure(mean)}%"
        marks.append(Mark(row=name, model="mean", value=mean, colour=HIGH_RANK_COLOUR, summary=words))
        marks += [
            Mark(row=name, model="seed", value=share, colour=MUTED, shape="tick", summary=f"{figure(share)}%")
            for share in shares
        ]
        figures.append(figure(mean))
    return Intervals(
        x=Axis(title="both answers are the two likeliest tokens, % of prompts"),
        rows=tuple(LABELS.get(method.method, shown(method.method)) for method in record.methods),
        marks=tuple(marks),
        models=("mean", "seed"),
        figures=tuple(figures),
        legend=(
            Key(label="mean over seeds", colour=HIGH_RANK_COLOUR, mark="dot"),
            Key(label="one seed", colour=MUTED, mark="tick"),
        ),
    )


def changes(record: Templates) -> Intervals:
    """What training did to the loss on each kind of tokens."""
    rows, marks, figures = [], [], []
    for method in record.methods:
        if method.method == "base":
            continue
        for tokens, label in TOKENS.items():
            change = method.loss(tokens).change
            name = f"{LABELS.get(method.method, shown(method.method))}, {label}"
            rows.append(name)
            figures.append(figure(change))
            marks.append(
                Mark(
                    row=name, model="mean", value=change.value, low=change.low, high=change.high,
                    colour=HIGH_RANK_COLOUR, summary=f"{name}: {with_interval(change)} nats per token",
                )
            )  # fmt: skip
    return Intervals(
        x=Axis(title="loss minus that of the model that was not trained, nats per token"),
        rows=tuple(rows),
        marks=tuple(marks),
        models=("mean",),
        figures=tuple(figures),
        lines=(0.0,),
        legend=(Key(label="not trained", colour=REFERENCE, mark="line"),),
    )


def _completions(record: Templates) -> Section:
    picture = completions(record)
    return Section(
        title="Completions",
        text=(
            "An answer counts by its first piece. “No overlap” prompts have no word that was trained on, "
            "“one overlap” prompts have one pair of words that was.",
        ),
        chart=draw(
            lambda *, width: picture.specification(width=width),
            name="Share of prompts whose two likeliest tokens are the two answers, no overlap",
            description="One row a method. All figures are in the table below.",
            legend=picture.legend,
        ),
        table=Table(
            caption=(
                "Share of prompts with both answers among the k likeliest tokens, and share in which a "
                "distractor is likelier than the less likely answer; % of prompts, means over seeds, with "
                "the least and the largest seed’s at k = 2. A prompt has few distinct tokens, so the "
                "memory alone nearly always has both answers among 25."
            ),
            columns=(
                Column(name="method"),
                Column(name="prompts"),
                Column(name="distribution"),
                Column(name="@2", unit="%"),
                Column(name="seeds", unit="% @2"),
                Column(name="@5", unit="%"),
                Column(name="@10", unit="%"),
                Column(name="@25", unit="%"),
                Column(name="distracted", unit="%"),
            ),
            rows=tuple(
                _row(method, split, scores)
                for split in SPLITS
                for scores in ("full", "memory")
                for method in record.methods
            ),
        ),
    )


def _row(method: TemplateMethod, split: str, scores: str) -> tuple[Cell, ...]:
    found = method.accuracy(split, scores)
    two = found.top["2"]
    return (
        LABELS.get(method.method, shown(method.method)),
        split,
        "whole" if scores == "full" else "memory alone",
        100 * statistics.fmean(two),
        f"{100 * min(two):.1f} to {100 * max(two):.1f}",
        *(100 * statistics.fmean(found.top[k]) for k in ("5", "10", "25")),
        100 * statistics.fmean(found.distracted),
    )


def _costs(record: Templates) -> Section:
    picture = changes(record)
    return Section(
        title="What it costs elsewhere",
        text=(
            "Ordinary text that was not trained on, and made-up stories with rare names that come back. To "
            "the right of the line training made the model worse.",
        ),
        chart=draw(
            lambda *, width: picture.specification(width=width),
            name="Change of the loss by training, nats per token",
            description="One row a method and a kind of tokens. All figures are in the table below.",
            legend=picture.legend,
        )
        if picture.rows
        else None,
        table=Table(
            caption="Nats per token, mean over seeds; intervals of 95% over blocks of text and seeds.",
            columns=(
                Column(name="method"),
                Column(name="tokens"),
                Column(name="counted"),
                Column(name="loss", unit="nats per token"),
                Column(name="change by training", unit="nats per token"),
            ),
            rows=tuple(
                (
                    LABELS.get(method.method, shown(method.method)), TOKENS[one.tokens], one.count, one.loss,
                    None if method.method == "base" else one.change,
                )
                for method in record.methods
                for one in method.losses
            ),
        ),
    )  # fmt: skip


def _rank(record: Templates) -> Section:
    return Section(
        title="Rank, and what was trained",
        text=(
            f"The least rank of the log-probabilities over {record.rank_contexts:,} contexts of prompts and "
            f"{record.rank_tokens:,} tokens, which is at most {record.rank_contexts:,}; a softmax of width "
            f"{record.width} has at most {record.width}. A rank says nothing of whether the probabilities "
            "are right.",
        ),
        table=Table(
            caption="One figure a seed, in the seeds’ order.",
            columns=(
                Column(name="method"),
                Column(name="least rank"),
                Column(name="log weight of the memory", unit="nats"),
                Column(name="loss of the answers", unit="last epoch, nats"),
                Column(name="learning rate"),
                Column(name="loss of both answers by rate", unit="one overlap, nats"),
                Column(name="parameters added"),
                Column(name="processor time", unit="seconds"),
            ),
            rows=tuple(
                (
                    LABELS.get(one.method, shown(one.method)), ", ".join(map(str, one.least_rank)),
                    ", ".join(f"{weight:.2f}" for weight in one.memory_weight) or None,
                    ", ".join(f"{loss:.3f}" for loss in one.last_loss) or None,
                    None if one.rate is None else f"{one.rate:g}",
                    ", ".join(f"{shown(rate)}: {loss:.3f}" for rate, loss in one.tried.items()) or None,
                    one.added, ", ".join(f"{seconds:.0f}" for seconds in one.seconds),
                )
                for one in record.methods
            ),
        ),
    )  # fmt: skip


def _setting(record: Templates) -> Section:
    rates = ", ".join(f"{shown(name)} {rate:g}" for name, rate in record.rates.items())
    return Section(
        title="The training",
        table=Table(
            caption="The same for all methods.",
            columns=(Column(name="quantity"), Column(name="value")),
            rows=(
                ("layers trained", f"the last {record.layers}, {record.trained:,} parameters"),
                ("steps", record.steps),
                ("prompts a step", record.batch),
                ("tokens of ordinary text a step", 0 if record.as_published else record.text_tokens),
                ("learning rates", rates),
                ("temperature of the memory", record.temperature),
                ("log weight of the memory at the start", record.memory_start),
                ("weight of the ranking loss", record.align),
                ("its margin", record.margin),
                ("tokens of a window of text", record.window),
                ("ordinary text", shown("; ".join(record.text))),
            ),
        ),
    )


def _reading(record: Templates) -> Section:
    return Section(
        title="How to read this",
        text=(
            "What training alone does is what softmax, trained, shows: a method helps as far as it does "
            "better than that.",
            "Each seed has its own split of the words, so the spread over seeds holds the luck of the split "
            "as well; methods of one seed share it.",
            "Each method has the one of the same rates with the least loss of both answers on the prompts "
            "with one overlap, of the first seed."
            if any(len(one.tried) > 1 for one in record.methods)
            else "The rates were tuned for nobody: small differences can be chance.",
        ),
    )
