"""The study of domains: what it plans, and correlations that are known."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from fullrank.errors import FullrankError
from fullrank.results import Corpora, Corpus, load, provenance, save
from fullrank.results.grid import GridRun
from fullrank.studies.domain_grid import DOMAINS, domains
from fullrank.studies.grid_plan import Extent, Text
from fullrank.studies.rank_correlation import related
from tests.studies.made_runs import followed, made_by_hand, plain_end

COUNT = 6


def texts() -> tuple[Text, ...]:
    facts = {"corpus": "x", "vocabulary": "512", "frequent": "100", "probability": "200"}
    return tuple(
        Text(name=name, data=(Path(f"{name}.txt"),), facts={**facts, "frequent": rank})
        for name, rank in (("en", "100"), ("de", "120"))
    )


@pytest.mark.parametrize("small", [False, True])
def test_the_plan_trains_every_width_on_every_text_with_its_vocabulary(small: bool) -> None:
    made = followed(DOMAINS, Extent(small=small, seeds=2, texts=texts()), plain_end)
    for spec in made.values():
        assert spec.text is not None
        assert spec.text.name == spec.factors["domain"]
        assert "data.bpe_size=512" in spec.settings
    assert len({spec.factors["width"] for spec in made.values()}) == (2 if small else 3)


def runs(costs: list[list[float]]) -> tuple[GridRun, ...]:
    """Domains whose ranks rise, with costs by seed."""
    made = []
    for place, own in enumerate(costs):
        facts = {"frequent": str(100 + place), "probability": "7", "domain": f"d{place}"}
        for seed, cost in enumerate(own):
            made.append(made_by_hand("x", 3.0, seed=seed, width="256", **facts))
            made.append(made_by_hand("x", 3.0 + cost, seed=seed, width="32", **facts))
    return tuple(made)


def test_a_cost_that_rises_with_rank_is_found_and_few_domains_say_nothing() -> None:
    rising = [[0.1 * place, 0.1 * place + 0.001, 0.1 * place - 0.001] for place in range(1, COUNT + 1)]
    found = {one.label: one for one in DOMAINS.answers(runs(rising))}
    first = found["frequent rank and the cost of width 32"]
    assert first.decision == "rises with rank"
    assert first.effect is not None
    assert first.effect.value == pytest.approx(1.0)
    assert 0.9 < first.seen < 1.0
    assert first.seeds == COUNT
    # A measure that is the same for all cannot be related to anything.
    assert found["probability rank and the cost of width 32"].decision == "undecided"
    assert found["d3: width 32 against 256"].decision == "worse"
    few = {one.label: one.decision for one in DOMAINS.answers(runs(rising[:4]))}
    assert few["frequent rank and the cost of width 32"] == "undecided"
    assert DOMAINS.answers(()) == ()


def test_no_relation_over_many_and_none_over_a_few() -> None:
    random = np.random.default_rng(1)
    names = [f"d{place}" for place in range(60)]
    ranks = {name: float(place) for place, name in enumerate(names)}
    values = {name: [float(value)] for name, value in zip(names, random.permutation(60), strict=True)}
    found = related("x", ranks, values, level=0.05, smallest=0.5)
    assert found.decision == "no relation of interest"
    assert found.effect is not None
    expected = stats.spearmanr(list(ranks.values()), [one for (one,) in values.values()]).statistic
    assert found.effect.value == pytest.approx(expected)
    some = {name: ranks[name] for name in names[:COUNT]}
    assert related("x", some, values, level=0.05, smallest=0.5).decision == "undecided"


def test_records_are_taken_in_the_order_of_the_texts(tmp_path: Path) -> None:
    committed = Path(__file__).parents[2] / "results" / "corpus_wikitext2.json"
    one, _ = load(committed)
    assert isinstance(one, Corpus)
    both = Corpora(title="two", corpora=(one, dataclasses.replace(one, name="other")), notes=())
    save(both, tmp_path / "both.json", provenance(seed=None, device="cpu"))
    found = domains((Path("a.txt"), Path("b.txt")), (), (tmp_path / "both.json",))
    assert [(text.name, text.facts["corpus"]) for text in found] == [("a", one.name), ("b", "other")]
    assert found[0].facts["frequent"] == "4637"
    with pytest.raises(FullrankError, match="1 domains and 2 records"):
        domains((Path("a.txt"),), (), (tmp_path / "both.json",))
    with pytest.raises(FullrankError, match="names that differ"):
        domains((), (Path("x/a"), Path("y/a")), (tmp_path / "both.json",))
