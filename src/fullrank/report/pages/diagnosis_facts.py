"""The single figures of a diagnosis as tables: a row a quantity, a column a model."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from fullrank.report.figures import Cell, percent, perplexity_share
from fullrank.report.page import Column, Table
from fullrank.report.pages.diagnosis_rows import head_name
from fullrank.report.subject import Subject
from fullrank.report.text import shown
from fullrank.results import QUESTIONS, Estimate

Fact = tuple[str, Callable[[Any], Cell]]

_FACTS: dict[str, tuple[Fact, ...]] = {
    "loss": (
        ("loss, nats per token", lambda one: one.nats_per_token),
        ("its standard error", lambda one: one.standard_error),
        ("perplexity per token", lambda one: one.perplexity),
        ("bits per byte", lambda one: one.bits_per_byte),
        ("tokens", lambda one: one.tokens),
        ("bytes", lambda one: one.bytes),
        ("text blocks", lambda one: one.blocks),
    ),
    "spectrum": (
        ("effective rank", lambda one: one.effective_rank),
        ("effective rank of a random matrix", lambda one: one.random_effective_rank),
        ("singular entropy, nats", lambda one: one.singular_entropy),
        ("stable rank", lambda one: one.stable_rank),
        ("participation ratio", lambda one: one.participation_ratio),
        ("condition", lambda one: one.condition),
        ("numerical rank", lambda one: one.numerical_rank),
        ("storage noise", lambda one: one.noise),
        ("noise computed from", lambda one: shown(one.noise_origin, 200)),
    ),
    "anisotropy": (
        ("tokens", lambda one: one.tokens),
        ("layers", lambda one: len(one.layers)),
        ("mean cosine of the last layer", lambda one: one.layers[-1].cosine if one.layers else None),
        ("the same, mean removed", lambda one: one.layers[-1].cosine_centred if one.layers else None),
    ),
    "logprob_rank": (
        ("least rank", lambda one: one.least_rank),
        ("ceiling", lambda one: one.ceiling),
        ("why this ceiling", lambda one: shown(one.ceiling_reason, 200)),
        ("rank by the largest gap", lambda one: one.gap_rank),
        ("that gap, as a ratio", lambda one: one.gap),
        ("noise floor", lambda one: one.noise_floor),
        ("contexts", lambda one: one.contexts),
        ("columns", lambda one: one.columns),
        ("method", lambda one: shown(one.method)),
    ),
    "rank_needed": (
        ("rank needed, refitted", lambda one: one.knee),
        ("rank needed, cut down only", lambda one: one.truncated_knee),
        ("tolerance, nats per token", lambda one: one.tolerance),
        ("loss of the matrix as it came", lambda one: one.original),
        ("gained by the last doubling of rank", lambda one: one.slope),
        ("loss still falls at full width", lambda one: one.still_falling),
    ),
    "better_head": (
        ("loss of the head as it came", lambda one: one.original),
        ("best high-rank head", lambda one: head_name(one.best)),
        ("its gain over the better control", lambda one: one.best_gain),
        ("as a share of the perplexity", lambda one: percent(perplexity_share(one.best_gain.value))),
        ("seeds", lambda one: one.seeds),
        ("tokens to fit on", lambda one: one.fit_tokens),
        ("held-out tokens", lambda one: one.held_out_tokens),
        ("rows of the matrix that were trained", lambda one: one.trained_rows),
    ),
    "unreachable": (
        ("tokens looked at", lambda one: one.vocabulary),
        ("can be first", lambda one: one.argmaxable),
        ("never first", lambda one: len(one.never)),
        ("of these, equal to another row", lambda one: one.duplicates),
        ("undecided", lambda one: one.undecided),
        ("padding rows that are never first", lambda one: one.padding_never),
        ("capacity, tokens", lambda one: one.capacity),
        ("its interval", lambda one: " to ".join(f"{end:,}" for end in one.capacity_interval)),
        ("sets tried for it", lambda one: one.capacity_samples),
        ("search, seconds", lambda one: one.seconds),
    ),
    "gradient": (
        ("kept norm, mean", lambda one: one.kept_norm),
        ("the same for a random subspace", lambda one: one.null_norm),
        ("kept energy, mean", lambda one: one.kept_energy),
        ("the same for a random subspace", lambda one: one.null_energy),
        *(
            (f"kept norm, {name}", lambda one, place=place: _at(one.quantiles, place))
            for place, name in enumerate(("5% of tokens", "25%", "median", "75%", "95%"))
        ),
        ("tokens", lambda one: one.tokens),
    ),
}


def facts(question: str, subjects: Sequence[Subject]) -> Table:
    """The single figures of a question."""
    return _table(
        _FACTS[question],
        [getattr(one.record, question) for one in subjects],
        subjects,
        caption="",
        # Side by side, these figures are what the page is for; alone, picture and text hold the main ones.
        folded="All figures" if len(subjects) == 1 else "",
    )


def measured(subjects: Sequence[Subject]) -> tuple[Table, ...]:
    """What the models are, what they were run on, and how long each question took."""
    model: tuple[Fact, ...] = (
        ("name", lambda one: shown(one.name)),
        ("source", lambda one: shown(one.source)),
        ("architecture", lambda one: shown(one.architecture)),
        ("parameters", lambda one: one.parameters),
        ("layers", lambda one: one.layers),
        ("width D", lambda one: one.width),
        ("vocabulary V, rows of the output matrix", lambda one: one.vocabulary),
        ("rows that the tokenizer can name", lambda one: one.tokens),
        ("output matrix is the input embedding", lambda one: one.tied),
        ("bias", lambda one: one.bias),
        ("logit scale", lambda one: one.logit_scale),
        ("soft cap", lambda one: one.softcap),
        ("final norm", lambda one: shown(one.final_norm) or "none found"),
        ("output matrix stored as", lambda one: shown(one.storage)),
        ("run in", lambda one: shown(one.dtype)),
        ("fingerprint", lambda one: shown(one.fingerprint)),
    )
    text: tuple[Fact, ...] = (
        ("sources", lambda one: _listed(one.sources)),
        ("SHA-256", lambda one: shown(one.sha256)),
        ("bytes used", lambda one: one.bytes),
        ("tokens predicted", lambda one: one.tokens),
        ("tokens a window", lambda one: one.window),
        ("windows", lambda one: one.windows),
        ("windows begin with a start token", lambda one: one.starts_with_bos),
        ("tokens to fit heads on", lambda one: one.fit_tokens),
        ("tokens to choose learning rates on", lambda one: one.choose_tokens),
        ("held-out tokens", lambda one: one.held_out_tokens),
    )
    names = list(dict.fromkeys([*QUESTIONS, *(name for one in subjects for name in one.record.seconds)]))
    times = tuple((shown(name), functools.partial(_time, name)) for name in names)
    return (
        _table(model, [one.record.model for one in subjects], subjects, caption="The model."),
        _table(text, [one.record.text for one in subjects], subjects, caption="The text."),
        _table(
            times,
            [one.record.seconds for one in subjects],
            subjects,
            caption="Seconds a question, on the machine that ran it.",
            folded="Time taken",
        ),
        *_commands(subjects),
    )


def _commands(subjects: Sequence[Subject]) -> tuple[Table, ...]:
    """How each answer came to be, where one command did not give them all."""
    several = len(subjects) > 1
    rows: list[tuple[Cell, ...]] = []
    for one in subjects:
        answered = one.record.answered
        if len({(each.made.command, each.made.commit, each.made.device) for each in answered.values()}) < 2:
            continue
        for question, each in answered.items():
            made = each.made
            settings = ", ".join(f"{name} {value}" for name, value in each.settings.items())
            rows.append(
                (
                    f"{one.name}: {shown(question)}" if several else shown(question),
                    shown(made.command, 400),
                    shown(made.time),
                    shown(made.commit[:12]) or "not recorded",
                    shown(made.device),
                    shown(settings, 300),
                )
            )
    if not rows:
        return ()
    names = ("question", "command", "time", "commit", "device", "settings")
    return (
        Table(
            caption="The answers come from several commands.",
            columns=tuple(Column(name=name) for name in names),
            rows=tuple(rows),
            folded="How each answer was made",
        ),
    )


def _table(
    quantities: Sequence[Fact],
    sections: Sequence[Any],
    subjects: Sequence[Subject],
    *,
    caption: str,
    folded: str = "",
) -> Table:
    rows: list[tuple[Cell, ...]] = [
        (label, *(None if section is None else take(section) for section in sections))
        for label, take in quantities
    ]
    rows = [row for row in rows if any(cell is not None for cell in row[1:])]
    columns = tuple(Column(name=one.name) for one in subjects)
    if len(subjects) == 1:
        # One model leaves room for its intervals beside the values.
        columns = (Column(name="value"),)
        if any(isinstance(row[1], Estimate) for row in rows):
            columns = (Column(name="value", shows="value"), Column(name="95% interval", shows="interval"))
            rows = [(label, cell, cell if isinstance(cell, Estimate) else "") for label, cell in rows]
    return Table(
        caption=caption, columns=(Column(name="quantity"), *columns), rows=tuple(rows), folded=folded
    )


def _listed(names: tuple[str, ...]) -> str:
    rest = len(names) - 4
    return ", ".join(shown(name) for name in names[:4]) + (f" and {rest:,} more" if rest > 0 else "")


def _time(name: str, seconds: dict[str, float]) -> float | None:
    return seconds.get(name)


def _at(values: tuple[float, ...], place: int) -> float | None:
    return values[place] if place < len(values) else None
