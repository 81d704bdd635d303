"""Diagnoses written by hand: estimates, facts of a model and of a text, a record without answers."""

from __future__ import annotations

from typing import Any

from fullrank.results.diagnosis import QUESTIONS, Diagnosis, Estimate, ModelFacts, TextFacts


def around(value: float, reach: float = 0.01) -> Estimate:
    return Estimate(value=value, low=value - reach, high=value + reach)


def model_facts(**changes: Any) -> ModelFacts:
    """Facts of a model of width 64 with 1,000 tokens and 50 rows of padding."""
    facts: dict[str, Any] = {
        "name": "tiny", "source": "directory", "architecture": "Tiny", "parameters": 1000, "layers": 2,
        "width": 64, "vocabulary": 1050, "tokens": 1000, "tied": True, "bias": False, "logit_scale": 1.0,
        "softcap": None, "final_norm": "RMSNorm", "storage": "float32", "dtype": "float32", "fingerprint": "",
        "notes": (),
    }  # fmt: skip
    return ModelFacts(**facts | changes)


def text_facts(**changes: Any) -> TextFacts:
    facts: dict[str, Any] = {
        "sources": ("prose.txt",), "sha256": "", "bytes": 4000, "tokens": 1000, "window": 128, "windows": 8,
        "starts_with_bos": False, "fit_tokens": 571, "choose_tokens": 143, "held_out_tokens": 286,
    }  # fmt: skip
    return TextFacts(**facts | changes)


def diagnosis(**answers: Any) -> Diagnosis:
    """A record with these fields, and without an answer to any other question."""
    fields: dict[str, Any] = dict.fromkeys(QUESTIONS)
    fields |= {"model": model_facts(), "text": text_facts(), "findings": (), "missing": (), "seconds": {}}
    return Diagnosis(**fields | answers)
