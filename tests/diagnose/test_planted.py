"""Defects planted in tiny models on disk, and what the command line finds of them, read from results.json.

The control is the same model without a defect: none of these findings may appear on it.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fullrank.cli import main
from tests.cli.conftest import blank_pictures

pytestmark = pytest.mark.usefixtures("few_orderings")

Build = Callable[..., Path]
CODES = {
    "rank_deficient_head", "rank_deficient_logprobs", "unreachable_tokens", "collapsed_layer",
    "outlier_dimension",
}  # fmt: skip
RANK, DEAD, DIMENSION = 11, 123, 21
GEOMETRY = ("loss", "spectrum", "anisotropy", "logprob_rank")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Found:
    results: dict[str, Any]
    page: str

    @property
    def codes(self) -> set[str]:
        return {finding["code"] for finding in self.results["findings"]} & CODES

    def sentence(self, code: str) -> str:
        (finding,) = [finding for finding in self.results["findings"] if finding["code"] == code]
        return finding["sentence"]


Diagnose = Callable[..., Found]


@pytest.fixture(scope="module")
def diagnosed(
    tiny_checkpoint: Build, few_orderings: None, text: Path, tmp_path_factory: pytest.TempPathFactory
) -> Diagnose:
    """diagnosed(family, plant, questions): a model with what `plant` does to it, by the command line."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from fullrank.models.loading import quiet

    def run(
        family: str, plant: Callable[[Any], None], only: tuple[str, ...] = GEOMETRY, **changes: Any
    ) -> Found:
        source = tiny_checkpoint(family, **changes)
        place = tmp_path_factory.mktemp("planted")
        with quiet(), torch.no_grad():
            model = AutoModelForCausalLM.from_pretrained(source)
            torch.manual_seed(1)
            plant(model)
            model.save_pretrained(place / "model")
            AutoTokenizer.from_pretrained(source).save_pretrained(place / "model")
        arguments = ["--text", str(text), "--out", str(place / "out"), "--tokens", "1024", "--window", "64"]
        # Findings are in the words of a page.
        with blank_pictures():
            assert main.run(["diagnose", str(place / "model"), *arguments, "--only", *only]) == 0
        return Found(
            results=json.loads((place / "out" / "results.json").read_text(encoding="utf8")),
            page=(place / "out" / "report.html").read_text(encoding="utf8"),
        )

    return run


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_healthy_model_has_no_finding(family: str, diagnosed: Diagnose) -> None:
    changes = {"tie_word_embeddings": False} if family == "llama" else {}
    found = diagnosed(family, lambda model: None, (*GEOMETRY, "unreachable"), **changes)
    assert found.codes == set()
    assert found.results["unreachable"]["never"] == []
    assert found.results["unreachable"]["undecided"] == 0
    assert found.results["logprob_rank"]["least_rank"] == found.results["logprob_rank"]["ceiling"]
    assert all(layer["outliers"] == [] for layer in found.results["anisotropy"]["layers"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_head_of_low_rank(diagnosed: Diagnose, dtype: torch.dtype) -> None:
    def plant(model: Any) -> None:
        weight = model.lm_head.weight
        weight.copy_(0.02 * torch.randn(len(weight), RANK) @ torch.randn(RANK, weight.shape[1]))
        model.to(dtype)

    found = diagnosed("llama", plant, tie_word_embeddings=False)
    assert found.results["model"]["storage"] == str(dtype).removeprefix("torch.")
    assert found.results["spectrum"]["numerical_rank"] == RANK
    assert found.results["logprob_rank"]["least_rank"] == RANK
    assert found.results["logprob_rank"]["ceiling"] == 32
    assert found.codes == {"rank_deficient_head"}
    assert f"rank {RANK} of 32" in found.sentence("rank_deficient_head")
    assert f"rank {RANK} of 32" in found.page


def test_states_of_low_rank(diagnosed: Diagnose) -> None:
    """The matrix is whole, but the last norm lets 20 dimensions through, as the log-probabilities show."""

    def plant(model: Any) -> None:
        model.model.norm.weight[20:] = 0.0

    found = diagnosed("llama", plant, tie_word_embeddings=False)
    assert found.results["spectrum"]["numerical_rank"] == 32
    assert found.results["logprob_rank"]["least_rank"] == 20
    assert found.codes == {"rank_deficient_logprobs"}


def inside(model: Any) -> None:
    rows = model.get_output_embeddings().weight
    # Of many: in 32 dimensions two random rows share an edge of the hull, and their mean lies on it.
    rows[DEAD] = rows[200:].mean(dim=0)


def zero(model: Any) -> None:
    model.get_output_embeddings().weight[DEAD] = 0.0


def equal(model: Any) -> None:
    rows = model.get_output_embeddings().weight
    rows[DEAD] = rows[7]


@pytest.mark.parametrize(
    ("family", "plant"),
    [
        ("llama", inside),
        ("gpt2", zero),
        # Each defect and each family is above once.
        pytest.param("llama", zero, marks=pytest.mark.slow),
        pytest.param("gpt2", inside, marks=pytest.mark.slow),
    ],
)
def test_a_token_that_can_never_lead(
    family: str, plant: Callable[[Any], None], diagnosed: Diagnose, tiny_tokenizer: Any
) -> None:
    changes = {"tie_word_embeddings": False} if family == "llama" else {}
    found = diagnosed(family, plant, ("unreachable",), **changes)
    answer = found.results["unreachable"]
    assert [token["id"] for token in answer["never"]] == [DEAD]
    assert answer["never"][0]["text"] == tiny_tokenizer.convert_ids_to_tokens(DEAD)
    assert (answer["argmaxable"], answer["undecided"], answer["duplicates"]) == (299, 0, 0)
    assert answer["never"][0]["depth"] > 0
    assert found.codes == {"unreachable_tokens"}
    assert found.sentence("unreachable_tokens").startswith("1 of 300 tokens can never")


def test_equal_rows_can_only_tie(diagnosed: Diagnose) -> None:
    found = diagnosed("llama", equal, ("unreachable",), tie_word_embeddings=False)
    answer = found.results["unreachable"]
    assert answer["duplicates"] == len(answer["never"])
    assert {token["id"] for token in answer["never"]} <= {7, DEAD}
    assert answer["never"]


def test_padding_that_can_never_lead_is_no_finding(diagnosed: Diagnose) -> None:
    def plant(model: Any) -> None:
        model.lm_head.weight[300:] = 0.0

    found = diagnosed("llama", plant, ("unreachable",), tie_word_embeddings=False, vocab_size=320)
    answer = found.results["unreachable"]
    assert answer["padding_never"] == 20
    assert (answer["vocabulary"], answer["never"]) == (300, [])
    assert found.codes == set()


def offset(model: Any) -> None:
    """Plant states within a small ball far from the origin."""
    model.transformer.ln_f.weight.fill_(0.01)
    model.transformer.ln_f.bias.fill_(1.0)


def line(model: Any) -> None:
    """Plant states along a slanted line: most variance lies in one direction, and in no single coordinate."""
    direction = torch.randn(32).sign()
    # The last block writes one direction, many times larger than what it adds to.
    model.model.layers[-1].mlp.down_proj.weight.copy_(1e3 * direction[:, None] * torch.randn(1, 64))


@pytest.mark.parametrize(("family", "plant"), [("gpt2", offset), ("llama", line)], ids=["offset", "line"])
def test_a_collapsed_last_layer(family: str, plant: Callable[[Any], None], diagnosed: Diagnose) -> None:
    found = diagnosed(family, plant)
    assert "collapsed_layer" in found.codes
    assert "outlier_dimension" not in found.codes
    last = found.results["anisotropy"]["layers"][-1]
    assert last["name"] == "output"
    if plant is offset:
        assert last["cosine"]["low"] > 0.99
        assert "mean cosine is 1.00" in found.sentence("collapsed_layer")
        # The geometry without the offset is that of the healthy model.
        assert last["cosine_centred"]["value"] < 0.5
    else:
        assert last["top_variance_share"] > 0.9


def test_an_outlier_dimension(diagnosed: Diagnose) -> None:
    def plant(model: Any) -> None:
        model.model.norm.weight[DIMENSION] *= 30

    found = diagnosed("llama", plant)
    assert found.codes == {"outlier_dimension", "collapsed_layer"}
    sentence = found.sentence("outlier_dimension")
    assert all(words in sentence for words in (f"dimension, {DIMENSION},", "at output", "1 of 4 layers"))
    layers = found.results["anisotropy"]["layers"]
    assert [outlier["dimension"] for outlier in layers[-1]["outliers"]] == [DIMENSION]
    assert all(layer["outliers"] == [] for layer in layers[:-1])
