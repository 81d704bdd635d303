"""The study of languages on two toy ones: equal tokens, every vocabulary, and bytes that have no room."""

import random
from pathlib import Path

import pytest

from fullrank.corpus.dimension import Measure
from fullrank.corpus.prepare import Settings
from fullrank.errors import FullrankError
from fullrank.studies import languages


def toy(folder: Path, seed: int, documents: int) -> Path:
    draw = random.Random(seed)
    words = ["".join(draw.choices("abcdefghijklm", k=draw.randint(2, 7))) for _ in range(300)]
    folder.mkdir()
    for number in range(documents):
        text = " ".join(draw.choices(words, weights=range(300, 0, -1), k=200))
        (folder / f"{number:03}.txt").write_text(text + "\n")
    return folder


@pytest.mark.slow(reason="counts several corpora, three seconds")
def test_every_corpus_has_the_same_number_of_tokens(tmp_path: Path) -> None:
    corpora = {"one": toy(tmp_path / "one", 0, 30), "two": toy(tmp_path / "two", 1, 24)}
    settings = Settings(order=3, workers=1, blocks=8, cache=tmp_path / "cache")
    record = languages.run(
        corpora,
        languages.Config(vocabularies=(300, 400), halvings=1),
        settings,
        Measure(constructions=("probability", "weighted")),
    )
    names = [one.name for one in record.corpora]
    assert names[:6] == [f"{name}, {kind}" for kind in ("bpe:300", "bpe:400", "bytes") for name in corpora]
    tokens = {one.tokens for one in record.corpora[:6]}
    assert len(tokens) == 1
    half = record.corpora[6]
    assert half.tokens == tokens.pop() // 2
    assert half.name.startswith("one, bpe:400, ")
    for one in record.corpora:
        for curve in one.curves:
            assert (
                curve.dimensions["50"] <= curve.dimensions["90"] <= curve.dimensions["99"] <= curve.vocabulary
            )
            assert curve.dimension_intervals is not None
            assert curve.null is not None
    in_bytes = [one for one in record.corpora if one.tokenizer == "bytes"]
    # Thirteen letters, a space and an end of line.
    assert {one.used for one in in_bytes} == {15}
    assert max(curve.dimensions["99"] for one in in_bytes for curve in one.curves) <= 15


def test_impossible_settings_are_refused() -> None:
    with pytest.raises(FullrankError, match="expected sizes of 257 or more"):
        languages.Config(vocabularies=(256,))
