"""A record of every kind survives its file, and the names that readers of results.json rely on stay."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fullrank import results
from fullrank.results import Corpora
from tests.report import records

RECORDS: dict[str, Any] = {
    "ladder": records.LADDER, "diagnosis": records.DIAGNOSIS, "attention": records.ATTENTION_ALONE,
    "series": records.SERIES, "upgrade": records.TAUGHT, "collapse": records.COLLAPSE,
    "corpora": Corpora(title="two", corpora=(records.corpus("a"), records.corpus("b")), notes=()),
    "templates": records.TEMPLATES, "generation": records.GENERATION, "grid": records.GRIDS["grid_attention"],
}  # fmt: skip


@pytest.mark.parametrize("name", RECORDS)
def test_a_record_survives_its_file(name: str, tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    results.save(RECORDS[name], path, records.PROVENANCE)
    # By their text, because no number that is none equals itself.
    assert repr(results.load(path)) == repr((RECORDS[name], records.PROVENANCE))


def test_names_that_readers_of_a_corpus_rely_on(tmp_path: Path) -> None:
    results.save(records.corpus("a"), tmp_path / "results.json", records.PROVENANCE)
    document = json.loads((tmp_path / "results.json").read_text())
    assert document["kind"] == "corpus"
    names = [curve["construction"] for curve in document["curves"]]
    assert names == ["probability", "weighted", "frequent", "log"]
    first = document["curves"][0]
    assert first["dimensions"] == records.DIMENSIONS
    assert {"contexts", "vocabulary", "singular_values"} <= first.keys()
