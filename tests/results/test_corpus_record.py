"""The record of a corpus survives its file, and holds what its readers are promised."""

import json
from pathlib import Path

from fullrank import results
from fullrank.results import Corpora, Corpus, CorpusCurve, CorpusNull, Estimate


def curve(construction: str) -> CorpusCurve:
    return CorpusCurve(
        construction=construction, contexts=40, vocabulary=12,
        least=5 if construction == "frequent" else None, prior=4.5 if construction == "log" else None,
        norm=3.5, singular_values=(3.0, 1.0, 0.5), singular_value_error=1e-9, method="lanczos", bound="Near.",
        dimensions={"50": 1, "90": 3, "99": 11},
        dimension_limits={"50": (1, 1), "90": (2, 4), "99": (11, 12)},
        dimension_intervals={"50": Estimate(value=1.0, low=0.5, high=float("inf"))},
        beyond_first={"50": 2, "90": 4, "99": 11},
        beyond_first_limits={"50": (2, 2), "90": (4, 4), "99": (11, 11)},
        grid=(1, 5, 12), relative_error=(0.4, 0.05, 0.0),
        relative_error_limits=((0.39, 0.04, 0.0), (0.41, 0.06, 0.0)), relative_error_interval=None, blocks=0,
        null=CorpusNull(dimensions={"50": 1, "90": 2, "99": 9}, relative_error=(0.3, 0.02, 0.0)), seconds=1.5,
    )  # fmt: skip


def corpus(name: str) -> Corpus:
    return Corpus(
        name=name, sources=("a.txt", "b.txt"), sha256="00", tokenizer="words", order=5, engine="duckdb",
        documents=2, bytes=900, replaced=1, tokens=200, pairs=190, contexts=40, entries=60, vocabulary=12,
        used=11, single=25, curves=tuple(map(curve, ("probability", "weighted", "frequent", "log"))),
        seconds={"count": 0.5}, notes=("one",),
    )  # fmt: skip


def test_round_trip(tmp_path: Path) -> None:
    made = results.provenance(seed=3, device="cpu")
    for record in (corpus("a"), Corpora(title="two", corpora=(corpus("a"), corpus("b")), notes=())):
        path = tmp_path / f"{record.kind}.json"
        results.save(record, path, made)
        assert results.load(path) == (record, made)


def test_names_that_readers_rely_on(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    results.save(corpus("a"), path, results.provenance(seed=None, device="cpu"))
    document = json.loads(path.read_text())
    assert document["kind"] == "corpus"
    assert [one["construction"] for one in document["curves"]] == [
        "probability",
        "weighted",
        "frequent",
        "log",
    ]
    first = document["curves"][0]
    assert first["dimensions"] == {"50": 1, "90": 3, "99": 11}
    assert {"contexts", "vocabulary", "singular_values"} <= first.keys()
