"""The main figures of each question in a sentence or two, for readers who unfold nothing."""

from __future__ import annotations

from fullrank.report.figures import figure, percent, whole, whole_interval, with_interval
from fullrank.report.pages.diagnosis_rows import REFERENCE_HEAD
from fullrank.report.text import shown
from fullrank.results import Diagnosis
from fullrank.results.diagnosis import (
    Anisotropy,
    BetterHead,
    Gradient,
    LogprobRank,
    Loss,
    RankNeeded,
    Spectrum,
    Unreachable,
)


def remark(question: str, record: Diagnosis) -> str:
    """What was found for a question that has an answer."""
    match getattr(record, question):
        case Loss() as loss:
            return (
                f"The loss is {with_interval(loss.nats_per_token)} nats per token: a perplexity of "
                f"{figure(loss.perplexity)}, or {with_interval(loss.bits_per_byte)} bits per byte."
            )
        case Spectrum() as spectrum:
            return (
                f"The effective rank is {figure(spectrum.effective_rank)} of {record.model.width:,}; a "
                f"random Gaussian matrix of the same shape has {figure(spectrum.random_effective_rank)}. The "
                f"noise is that of {shown(spectrum.noise_origin, 200)}."
            )
        case Anisotropy(layers=()):
            return "No layer was looked at."
        case Anisotropy(layers=layers):
            return (
                f"In the last layer the mean cosine is {with_interval(layers[-1].cosine)}, and with the mean "
                f"removed {with_interval(layers[-1].cosine_centred)}."
            )
        case LogprobRank() as rank:
            return (
                f"The least rank is {rank.least_rank:,}, the ceiling {rank.ceiling:,} "
                f"({shown(rank.ceiling_reason, 200).rstrip(' .')})."
            )
        case RankNeeded() as needed:
            between = whole_interval(needed.knee)
            return (
                f"The rank needed is {whole(needed.knee.value)}{f' ({between})' if between else ''} of "
                f"{record.model.width:,}; the last doubling of the rank bought {with_interval(needed.slope)} "
                "nats per token."
            )
        case BetterHead() as head:
            refitted = [fit.loss for fit in head.fits if fit.head == REFERENCE_HEAD]
            if not refitted:
                return f"The head as it came has a loss of {with_interval(head.original)} nats per token."
            return (
                f"Refitting the softmax itself takes the held-out loss from {figure(head.original)} to "
                f"{figure(refitted[0])} nats per token: the line at 0 stands for the second."
            )
        case Unreachable(never=()) as tokens:
            return f"No token was found that is never first; {tokens.undecided:,} were left undecided."
        case Unreachable() as tokens:
            share = len(tokens.never) / tokens.vocabulary if tokens.vocabulary > 0 else float("nan")
            return (
                f"{len(tokens.never):,} of {tokens.vocabulary:,} tokens ({percent(share)}) are never first; "
                f"{tokens.undecided:,} were left undecided."
            )
        case Gradient() as gradient:
            return (
                f"On average {percent(gradient.kept_norm.value)} of the norm is kept; a random subspace of "
                f"the same rank keeps {percent(gradient.null_norm)}."
            )
    raise AssertionError(f"no remark on {question}")
