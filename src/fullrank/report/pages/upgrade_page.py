"""The pages of an upgrade and of a collapse: nats before and after against the controls, with intervals."""

from __future__ import annotations

from collections.abc import Sequence

from fullrank.report.charts.axis import Axis
from fullrank.report.charts.intervals import Intervals, Mark
from fullrank.report.charts.theme import HIGH_RANK_COLOUR, MUTED, SOFTMAX_COLOUR, Key
from fullrank.report.figures import Cell, figure, with_interval
from fullrank.report.page import Column, Page, Section, Table, chart_of
from fullrank.report.text import shown
from fullrank.results import Collapse, Estimate, Upgrade
from fullrank.results.upgrade import TrainedHead, TrainingText, UpgradeTraining

CONTROLS = {"softmax": "softmax, the original", "softmax_equal": "softmax, as many parameters"}


def upgrade_page(record: Upgrade) -> Page:
    """The page of an upgrade."""
    model = record.model
    return Page(
        title=f"Upgrade of {shown(model.name)} to {shown(record.head)}",
        lead=(
            f"{model.parameters:,} parameters before, {record.parameters:,} with the new head; width D = "
            f"{model.width:,}, vocabulary V = {model.vocabulary:,}. {shown(record.verdict, 500)}"
        ),
        sections=(
            *(_training(record.training, record) if record.training is not None else ()),
            *_preserved(record),
            *_notes(record.notes),
        ),
    )


def collapse_page(record: Collapse) -> Page:
    """The page of a collapse."""
    rows: tuple[tuple[Cell, ...], ...] = (
        ("cost: KL(upgraded ‖ plain)", record.cost),
        ("the same before fitting, with the upgraded head’s own matrix", record.start),
        ("loss of the upgraded model", record.upgraded_loss),
        ("loss of the plain model", record.plain_loss),
    )
    return Page(
        title=f"{shown(record.model)} as a plain {shown(record.architecture)}",
        lead=(
            f"The closest plain softmax head to the model’s {shown(record.head)} head. On held-out text it "
            f"costs {with_interval(record.cost)} nats per token."
        ),
        sections=(
            Section(
                title="What it costs",
                text=(
                    "KL(upgraded ‖ plain) is how far the plain model’s predictions are from the upgraded "
                    "one’s; at 0 they are the same. The losses are on the tokens that came, and the plain "
                    "model’s can be the lower one.",
                ),
                table=Table(
                    caption="On the held-out text, with intervals of 95% over blocks of text.",
                    columns=(Column(name="quantity"), Column(name="value", unit="nats per token")),
                    rows=rows,
                ),
            ),
            Section(
                title="The fit",
                table=_text_table(
                    record.text,
                    ("rows of the output matrix fitted one by one", record.rows),
                    ("steps", record.steps),
                    ("seconds", record.seconds),
                ),
            ),
            *_notes(record.notes),
        ),
    )


def _training(found: UpgradeTraining, record: Upgrade) -> tuple[Section, ...]:
    taught = found.teacher
    of = "loss" if taught is None else "KL from the teacher"
    how = "each with a copy of the body" if found.unfrozen else "on states of the frozen body"
    trained = (
        f"Every head starts as the original and is trained in the same way, {how}: same text, same rows of "
        "the output matrix, same learning rates to choose from, same stopping rule. Further left is better."
    )
    if taught is not None:
        trained += (
            f" All were trained to say what {shown(taught.model.name)} says of the text, on KL(teacher ‖ "
            f"head). Its own loss there is {with_interval(taught.loss)} nats per token."
        )
    sections = [
        Section(
            title="Before and after training",
            text=(trained,),
            chart=chart_of(
                losses(found) if taught is None else distances(found),
                name=f"Held-out {of} before and after training, by head, nats per token",
                description="All figures are in the table below.",
            ),
            table=_heads(found),
        ),
    ]
    if taught is not None:
        sections.append(
            _gain(
                record.head, found, taught.control, taught.gain, taught.gain_by_seed,
                title="Nearer to the teacher than", of="KL from the teacher",
            )
        )  # fmt: skip
    title = "Gain over" if taught is None else "Gain in loss over"
    sections.append(
        _gain(record.head, found, found.control, found.gain, found.gain_by_seed, title=title, of="loss")
    )
    if found.candidates:
        sections.append(
            Section(
                title="Heads that were tried",
                table=Table(
                    caption="Each after a short training, on the text for choosing.",
                    columns=(
                        Column(name="head"),
                        Column(name=of, unit="nats per token"),
                        Column(name="better control", unit="nats per token"),
                        Column(name="time", unit="seconds"),
                        Column(name="left out because"),
                    ),
                    rows=tuple(
                        (
                            shown(one.head),
                            None if one.reason else one.choose_loss,
                            None if one.reason else one.control_loss,
                            None if one.reason else one.seconds,
                            shown(one.reason, 200),
                        )
                        for one in found.candidates
                    ),
                ),
            )
        )
    sections.append(
        Section(
            title="The training",
            table=_text_table(
                found.text,
                ("rows of the output matrix trained", found.rows),
                ("loss in training over the whole vocabulary", "yes" if found.exact else "no, estimated"),
                ("seeds", found.seeds),
                ("seed that was saved", found.saved_seed),
                ("its held-out loss, nats per token", found.saved_loss),
                ("seconds", found.seconds),
            ),
        )
    )
    return tuple(sections)


def _gain(
    head: str,
    found: UpgradeTraining,
    control: str,
    mean: Estimate,
    by_seed: tuple[float, ...],
    *,
    title: str,
    of: str,
) -> Section:
    return Section(
        title=f"{title} {CONTROLS.get(control, shown(control))}",
        text=(
            f"The {of} of the better control minus that of the upgraded head, token by token on the same "
            "held-out text. An interval with 0 in it shows no gain. It is what the head buys this body "
            f"{'after this training' if found.unfrozen else 'frozen'}, on this text; not what a body "
            "trained with it from the start would reach.",
        ),
        chart=chart_of(
            gain(head, mean, by_seed),
            name="Gain over the better control, nats per token",
            description=f"The mean is {figure(mean)}.",
        ),
    )


def losses(found: UpgradeTraining) -> Intervals:
    """Each head's held-out loss."""
    return _before_and_after(found, "held-out loss", [(one.before, one.after) for one in found.fits])


def distances(found: UpgradeTraining) -> Intervals:
    """Each head's KL from the teacher on held-out text."""
    far = [one.distance for one in found.fits]
    return _before_and_after(
        found, "KL(teacher ‖ head)", [(one.before, one.after) for one in far if one is not None]
    )


def _before_and_after(
    found: UpgradeTraining, of: str, values: Sequence[tuple[Estimate, Estimate]]
) -> Intervals:
    """A ring before training, a dot after it."""
    names = tuple(_label(one) for one in found.fits)
    marks = []
    for name, one, (before, after) in zip(names, found.fits, values, strict=True):
        colour = SOFTMAX_COLOUR if one.head in CONTROLS else HIGH_RANK_COLOUR
        marks.append(_mark(name, "before", "ring", before, MUTED))
        marks.append(_mark(name, "after", "dot", after, colour))
    return Intervals(
        x=Axis(title=f"{of}, nats per token"),
        rows=names,
        marks=tuple(marks),
        models=("before", "after"),
        figures=tuple(figure(after) for _, after in values),
        legend=(
            Key(label="before training", colour=MUTED, mark="ring"),
            Key(label="after, control", colour=SOFTMAX_COLOUR, mark="dot"),
            Key(label="after, upgraded head", colour=HIGH_RANK_COLOUR, mark="dot"),
        ),
    )


def gain(head: str, mean: Estimate, by_seed: tuple[float, ...]) -> Intervals:
    """The gain with its interval, and that of every seed."""
    first = f"{shown(head)}, all seeds"
    rows = (first, *(f"seed {number}" for number in range(len(by_seed))))
    marks = [_mark(first, "", "dot", mean, HIGH_RANK_COLOUR)]
    for row, value in zip(rows[1:], by_seed, strict=True):
        marks.append(
            Mark(
                row=row, model="", value=value, colour=HIGH_RANK_COLOUR, shape="tick",
                summary=f"{row}: {figure(value)} nats per token",
            )
        )  # fmt: skip
    return Intervals(
        x=Axis(title="gain over the better control, nats per token"),
        rows=rows,
        marks=tuple(marks),
        models=("",),
        figures=(figure(mean), *(figure(value) for value in by_seed)),
        lines=(0.0,),
    )


def _mark(row: str, words: str, shape: str, estimate: Estimate, colour: str) -> Mark:
    label = f"{row}, {words}" if words else row
    return Mark(
        row=row, model=words, value=estimate.value, low=estimate.low, high=estimate.high, colour=colour,
        shape=shape, summary=f"{label}: {with_interval(estimate)} nats per token",
    )  # fmt: skip


def _label(one: TrainedHead) -> str:
    return CONTROLS.get(one.head, shown(one.head))


def _heads(found: UpgradeTraining) -> Table:
    taught = found.teacher is not None
    of = "loss " if taught else ""
    near = (Column(name="KL before"), Column(name="KL after")) if taught else ()
    return Table(
        caption="Nats per token on the held-out text; intervals of 95% over blocks of text, and over seeds.",
        columns=(
            Column(name="head"),
            *near,
            Column(name=f"{of}before"),
            Column(name=f"{of}after"),
            Column(name="own parameters", unit="without the matrix"),
            Column(name="trained", unit="parameters"),
            Column(name="learning rate", unit="relative"),
            Column(name="steps", unit="by seed"),
            Column(name="time", unit="seconds"),
        ),
        rows=tuple(
            (
                _label(one), *_far(one), one.before, one.after, one.parameters, one.trained, one.rate,
                ", ".join(map(str, one.steps)), one.seconds,
            )
            for one in found.fits
        ),
    )  # fmt: skip


def _far(one: TrainedHead) -> tuple[Estimate, ...]:
    return () if one.distance is None else (one.distance.before, one.distance.after)


def _preserved(record: Upgrade) -> tuple[Section, ...]:
    kept = record.preserved
    if kept is None:
        return ()
    return (
        Section(
            title="The same model before training",
            table=Table(
                caption=f"The upgraded model held against the original on {kept.tokens:,} tokens of text.",
                columns=(Column(name="quantity"), Column(name="value", unit="nats")),
                rows=(
                    ("KL(original ‖ upgraded), a token", kept.kl.value),
                    ("largest difference of a log-probability of what came", kept.largest),
                ),
            ),
        ),
    )


def _text_table(text: TrainingText, *more: tuple[Cell, ...]) -> Table:
    sources = ", ".join(text.sources[:3]) + (", ..." if len(text.sources) > 3 else "")
    return Table(
        caption="In three parts of whole windows, in the text’s own order.",
        columns=(Column(name="quantity"), Column(name="value")),
        rows=(
            ("text", shown(sources)),
            ("tokens trained on", text.fit_tokens),
            ("tokens for choosing rates and stopping points", text.choose_tokens),
            ("tokens judged on", text.held_out_tokens),
            ("tokens a window", text.window),
            *more,
        ),
    )


def _notes(notes: tuple[str, ...]) -> tuple[Section, ...]:
    return (Section(title="Notes", items=tuple(shown(note, 400) for note in notes)),) if notes else ()
