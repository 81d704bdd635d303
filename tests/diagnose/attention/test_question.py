"""Attention measured: planted heads with known answers, tiny models of many families, the command line."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fullrank import results
from fullrank.cli import main
from fullrank.diagnose.attention import capture
from fullrank.diagnose.attention.measures import plan
from fullrank.diagnose.attention.question import attention
from fullrank.errors import FullrankError
from fullrank.models.anatomy import states
from fullrank.models.attention import install_normaliser
from fullrank.models.loading import quiet
from fullrank.models.output_layer import OutputLayer
from fullrank.ops import IDENTITY
from fullrank.results.attention import Attention
from tests.cli.conftest import blank_pictures

Build = Callable[..., Path]
POSITIONS, VOCABULARY = 32, 40
UNIFORM, ONE_HOT, PREVIOUS, TIE = range(4)


def output_of(model: Any, vocabulary: int) -> OutputLayer:
    weight = model.get_output_embeddings().weight.detach().float().clone()
    return OutputLayer(weight=weight, bias=None, pointwise=IDENTITY, tokens=vocabulary)


@pytest.fixture(scope="module")
def planted_model() -> Any:
    """One layer of GPT-2 that sees positions only, with four heads whose weights are known.

    Its states are one-hot by position, so that keys, queries and values can be written down for each.
    """
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=POSITIONS, n_embd=POSITIONS, n_layer=1, n_head=4,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, tie_word_embeddings=False,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    with quiet():
        model = GPT2LMHeadModel(config).eval()
    width = POSITIONS // 4
    queries, keys, values = (torch.zeros(4, POSITIONS, width) for _ in range(3))
    # The scale of GPT-2's scores is undone, and what loses does so by 200: its weight is 0 in fp32.
    strong = 200 * math.sqrt(width)
    queries[ONE_HOT, :, 0], keys[ONE_HOT, 3, 0] = 1.0, strong
    queries[TIE, :, 0], keys[TIE, [2, 5], 0] = 1.0, strong
    angles = 2 * math.pi * torch.arange(POSITIONS) / POSITIONS
    sharp = strong / (1 - math.cos(2 * math.pi / POSITIONS))
    keys[PREVIOUS, :, 0], keys[PREVIOUS, :, 1] = angles.cos(), angles.sin()
    earlier = angles - angles[1]
    queries[PREVIOUS, :, 0], queries[PREVIOUS, :, 1] = sharp * earlier.cos(), sharp * earlier.sin()
    # The values of the uniform head are all zero, which fp32 keeps exactly equal.
    for head in (ONE_HOT, PREVIOUS, TIE):
        values[head] = torch.randn(POSITIONS, width)
    values[TIE, 2], values[TIE, 5] = torch.eye(width)[0], torch.eye(width)[1]
    with torch.no_grad():
        model.transformer.wte.weight.zero_()
        model.transformer.wpe.weight.copy_(torch.eye(POSITIONS))
        block = model.transformer.h[0]
        normed = block.ln_1(torch.eye(POSITIONS))
        shift = float(normed[0, 1])
        scale = float(normed[0, 0]) - shift
        # A state is scale e_p + shift: the bias takes the second part off again.
        parts = [part.transpose(0, 1).reshape(POSITIONS, -1) for part in (queries, keys, values)]
        wanted = torch.cat(parts, dim=1) / scale
        block.attn.c_attn.weight.copy_(wanted)
        block.attn.c_attn.bias.copy_(-shift * wanted.double().sum(0))
    return model


@pytest.fixture(scope="module")
def planted(planted_model: Any) -> Attention:
    ids = torch.randint(0, VOCABULARY, (6, POSITIONS), generator=torch.Generator().manual_seed(1))
    return attention(planted_model, output_of(planted_model, VOCABULARY), ids, memory=1 << 28, loss_tokens=64)


def test_planted_heads_are_measured_exactly(planted: Attention) -> None:
    heads = {one.head: one for one in planted.by_head}
    assert planted.difference < 1e-6
    assert planted.eager_difference < 1e-6
    # Two queries, which see 31 and 32 positions.
    seen = (31, 32)
    uniform = heads[UNIFORM]
    assert uniform.visible == pytest.approx(31.5)
    assert uniform.effective_tokens == pytest.approx(31.5, rel=1e-5)
    assert uniform.first_mass == pytest.approx(sum(1 / one for one in seen) / 2, rel=1e-5)
    assert uniform.sensitivity == pytest.approx(1 / 32, rel=1e-5)
    for head in (ONE_HOT, PREVIOUS):
        assert heads[head].effective_tokens == pytest.approx(1, abs=1e-6)
        assert heads[head].largest == pytest.approx(1, abs=1e-6)
        assert heads[head].first_mass == 0
        assert heads[head].sensitivity == pytest.approx(0, abs=1e-6)
        # One of the 16 has all the weight; the others are as far from it as all that are outside.
        assert heads[head].separable == 1 / planted.reference_size
    tie = heads[TIE]
    assert tie.effective_tokens == pytest.approx(2, abs=1e-5)
    assert tie.largest == pytest.approx(0.5, abs=1e-6)
    assert tie.sensitivity == pytest.approx(0.5, abs=1e-6)
    assert tie.separable == 2 / planted.reference_size


def test_planted_sets_are_measured_exactly(planted_model: Any) -> None:
    """By size, of one head after the other, from the tables that the record is made of."""
    from fullrank.diagnose.attention.measures import Tally

    where = plan(POSITIONS)
    tally = Tally(where, 2, seed=0, memory=1 << 20, what_if=["softmax", "sink"])
    ids = torch.zeros(2, POSITIONS, dtype=torch.long)
    with capture.watched(planted_model, where.rows(), lambda seen: tally.take(seen, slice(0, 2))):
        states(planted_model, ids)
    tables = {name: tally.stacked(f"set {name} top") for name in ("recall", "precision", "distance", "mass")}
    assert all(table is not None for table in tables.values())
    for number, size in enumerate(where.sizes):
        found = {name: table[:, :, 0, number].mean(0) for name, table in tables.items() if table is not None}
        # Equal weights of equal values: nothing is nearer to the sum than anything else.
        assert float(found["recall"][UNIFORM]) == 0
        assert float(found["precision"][UNIFORM]) == pytest.approx((size / 31 + size / 32) / 2)
        assert float(found["mass"][UNIFORM]) == pytest.approx((size / 31 + size / 32) / 2, rel=1e-5)
        for head in (ONE_HOT, PREVIOUS):
            assert float(found["recall"][head]) == pytest.approx(1 / size)
            assert float(found["mass"][head]) == pytest.approx(1, abs=1e-6)
            shares = [1.0 if size == 1 else size / seen for seen in (31, 32)]
            assert float(found["precision"][head]) == pytest.approx(sum(shares) / 2)
        # Two orthogonal values of weight 1/2 are nearer to their sum than the origin is.
        assert float(found["recall"][TIE]) == pytest.approx(1.0 if size <= 2 else 2 / size)
        if size == 2:
            assert float(found["precision"][TIE]) == 1
            rest = sum(seen - size for seen in (31, 32)) / 2
            assert float(found["distance"][TIE]) == pytest.approx(rest * math.sqrt(0.5), rel=1e-5)
    # Beside a sink of score 0 uniform weights of score 0 lose one part in n + 1.
    total = tally.stacked("if total")
    assert total is not None
    assert float(total[0, UNIFORM, 0, 1]) == pytest.approx((31 / 32 + 32 / 33) / 2, rel=1e-6)
    assert int(tally.exceeded.sum()) == 0


def test_the_envelope_of_planted_scores(planted: Attention) -> None:
    (length,) = planted.by_length
    assert length.length == POSITIONS
    assert length.log_largest == pytest.approx((0 + 2 * math.log(31.5) + math.log(31.5 / 2)) / 4, abs=1e-3)
    assert length.score_range is not None
    assert length.exponent is not None
    assert length.score_range <= length.exponent
    assert [one.temperature for one in planted.by_temperature if one.temperature == 1.0] == [1.0]
    for one in planted.by_temperature:
        assert one.exact_largest == pytest.approx(one.bound)
        assert one.estimated_largest <= one.bound
        assert one.above_quarter == pytest.approx(0.25)


# Families


def tiny(tiny_checkpoint: Build, family: str, **changes: Any) -> Any:
    from transformers import AutoModelForCausalLM

    with quiet():
        return AutoModelForCausalLM.from_pretrained(tiny_checkpoint(family, **changes)).eval()


def measured(model: Any, *, windows: int = 2, length: int = 48) -> Attention:
    ids = torch.randint(0, 300, (windows, length), generator=torch.Generator().manual_seed(1))
    return attention(model, output_of(model, 300), ids, memory=1 << 28, loss_tokens=96)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("gemma2", {"attn_logit_softcapping": 0.5, "sliding_window": 16}),
        # Keys that are not grouped, and a window in every layer.
        pytest.param("phi", {}, marks=pytest.mark.slow),
        pytest.param("mistral", {"sliding_window": 20}, marks=pytest.mark.slow),
    ],
)
def test_families(family: str, changes: dict[str, Any], tiny_checkpoint: Build) -> None:
    model = tiny(tiny_checkpoint, family, **changes)
    before = model.config._attn_implementation
    found = measured(model)
    assert model.config._attn_implementation == before
    assert (found.weights, found.scores) == ("eager", "queries and keys")
    assert found.difference < 1e-6
    assert found.eager_difference < 1e-5
    assert found.eager_positions == 48
    assert (found.layers, found.heads) == (2, 8)
    grouped = family in ("gemma2", "mistral")
    assert [one.key_head for one in found.by_head] == ([0, 0, 1, 1] if grouped else [0, 1, 2, 3]) * 2
    assert any("grouped" in note for note in found.notes) == grouped
    window = changes.get("sliding_window", 48)
    # Every second layer of a gemma2 has a window.
    narrow = {"gemma2": (0,), "mistral": (0, 1)}.get(family, ())
    assert found.sliding_layers == narrow
    for one in found.by_head:
        assert one.visible == (window if one.layer in narrow else 47.5)
        assert 1 <= one.effective_tokens <= one.visible
    assert all(one.exceeded == 0 for one in found.by_size)
    for length in found.by_length:
        assert length.exponent is not None
        assert length.score_range is not None
        assert length.score_range <= length.exponent * (1 + 1e-5)
    assert [one.name for one in found.normalisers][:1] == ["softmax"]
    changed = [one for one in found.normalisers if one.name != "softmax"]
    assert all(one.reason == "" and one.change is not None for one in changed)
    assert found.kept[-1].size == 16


def test_weights_are_those_of_the_whole_model_in_eager_attention(tiny_checkpoint: Build) -> None:
    """Also where the queries come in several pieces, for want of memory."""
    model = tiny(tiny_checkpoint, "llama")
    ids = torch.randint(0, 300, (2, 40), generator=torch.Generator().manual_seed(2))
    rows = torch.tensor([0, 7, 8, 39])
    seen: list[capture.Seen] = []
    plain = states(model, ids)
    with capture.watched(model, rows, seen.append, memory=30_000):
        watched = states(model, ids)
    torch.testing.assert_close(watched, plain)
    with capture.implementation(model, "eager"), torch.no_grad():
        exact = model(input_ids=ids, output_attentions=True).attentions
    for one, table in zip(seen, exact, strict=True):
        torch.testing.assert_close(one.weights, table[:, :, rows], atol=1e-6, rtol=1e-5)
        assert one.visible.sum(-1)[0, 0].tolist() == [1, 8, 9, 40]


def test_keeping_all_weights_changes_nothing(tiny_checkpoint: Build) -> None:
    model = tiny(tiny_checkpoint, "llama")
    ids = torch.randint(0, 300, (1, 40), generator=torch.Generator().manual_seed(2))
    none = torch.zeros(0, dtype=torch.long)
    plain = states(model, ids)
    with capture.watched(model, none, None, keep=40):
        torch.testing.assert_close(states(model, ids), plain)
    with capture.watched(model, none, None, keep=1):
        assert float((states(model, ids) - plain).abs().max()) > 1e-3


def test_a_model_that_only_gives_its_weights(tiny_checkpoint: Build) -> None:
    found = measured(tiny(tiny_checkpoint, "bloom"))
    assert (found.weights, found.scores) == ("outputs", "logarithms of the weights")
    assert math.isnan(found.difference)
    assert found.by_size == ()
    assert found.reference_size == 0
    assert all(one.separable is None for one in found.by_head)
    assert found.by_length[-1].exponent is None
    assert "shows its weights only" in " ".join(found.notes)
    kinds = {one.name: one for one in found.normalisers}
    assert kinds["softmax"].effective_tokens == pytest.approx(
        found.by_length[-1].effective_tokens.value, rel=1e-5
    )
    # These see a constant in the scores, which weights do not tell.
    assert kinds["sigmoid"].effective_tokens is None
    assert all("does not let its attention be exchanged" in one.reason for one in found.normalisers)


@pytest.mark.slow
def test_a_model_with_a_learnt_sink(tiny_checkpoint: Build) -> None:
    """Its weights are its own, and what cannot be exchanged is said."""
    from transformers import GptOssConfig, GptOssForCausalLM

    config = GptOssConfig(
        vocab_size=300, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, num_local_experts=2, num_experts_per_tok=1, sliding_window=16,
        max_position_embeddings=64, bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    with quiet():
        torch.manual_seed(0)
        model = GptOssForCausalLM(config).eval()
    rounded = copy.deepcopy(model).bfloat16()
    with torch.no_grad():
        for layer in rounded.model.layers:
            layer.self_attn.sinks.fill_(3.0)
    assert measured(rounded).scores == "logarithms of the weights"
    found = measured(model)
    assert found.scores == "logarithms of the weights"
    assert found.difference > 1e-3
    assert found.by_size
    assert found.by_length[-1].exponent is None
    assert any("does more than a softmax" in note for note in found.notes)
    assert any("sink" in one.reason for one in found.normalisers)


def test_rounding_of_large_scores_is_no_other_attention(tiny_checkpoint: Build) -> None:
    """In bf16 a score of 40 is rounded by an eighth, and weights move by some hundredths."""
    model = tiny(tiny_checkpoint, "llama")
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight.mul_(1000)
    found = measured(model.bfloat16())
    assert found.difference > capture.HALF_AGREEMENT
    assert found.scores == "queries and keys"
    assert not any("does more than a softmax" in note for note in found.notes)


def test_models_without_attention_are_told_so(tiny_checkpoint: Build) -> None:
    with pytest.raises(FullrankError, match=r"MambaForCausalLM has no attention.*ask the other questions"):
        measured(tiny(tiny_checkpoint, "mamba"))


@pytest.mark.slow
def test_a_model_trained_with_another_normaliser_is_told_so(tiny_checkpoint: Build) -> None:
    model = tiny(tiny_checkpoint, "llama")
    install_normaliser(model, "sigmoid")
    with pytest.raises(FullrankError, match="sigmoid attention, and what is asked is about softmax"):
        measured(model)


def test_short_windows_have_few_sets(tiny_checkpoint: Build) -> None:
    found = measured(tiny(tiny_checkpoint, "llama"), length=8)
    assert found == measured(tiny(tiny_checkpoint, "llama"), length=8)
    assert {one.size for one in found.by_size} == {1, 2, 5}
    assert found.reference_size == 5
    shortest = measured(tiny(tiny_checkpoint, "llama"), length=4)
    assert shortest.by_length[0].length == 4
    assert max((one.size for one in shortest.by_size), default=0) < 4


def test_lengths_and_sizes_fit_the_window() -> None:
    assert plan(600).lengths == plan(512).lengths == (32, 64, 128, 256, 512)
    assert plan(700).lengths == (32, 64, 128, 256, 512, 700)
    assert plan(20).lengths == (20,)
    assert plan(512).reference == 16
    assert plan(64).rows().tolist() == [30, 31, 62, 63]
    assert max(plan(64).sizes) < 63


# The command line


def run(model: Path, text: Path, out: Path, *only: str) -> int:
    flags = ["--text", str(text), "--out", str(out), "--tokens", "384", "--window", "64", "--only", *only]
    with blank_pictures():
        return main.run(["diagnose", str(model), *flags])


def test_the_command(
    tiny_checkpoint: Build, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another question later keeps the answer, and older records without one are read."""
    model = tiny_checkpoint("llama")
    assert run(model, text, tmp_path, "attention") == 0
    printed = capsys.readouterr().out
    assert "effective tokens of" in printed
    assert "(random: " in printed
    record, _ = results.load(tmp_path / "results.json")
    assert (record.attention.heads, record.attention.windows, record.attention.tests) == (8, 6, 4)
    assert record.loss is None
    # No state was kept: attention was the only question.
    assert not list(tmp_path.rglob("*.safetensors"))
    assert "Attention of llama" in (tmp_path / "report.html").read_text(encoding="utf8")
    assert run(model, text, tmp_path, "loss") == 0
    again, _ = results.load(tmp_path / "results.json")
    assert (again.attention, again.text) == (record.attention, record.text)
    assert again.loss is not None
    page = (tmp_path / "report.html").read_text(encoding="utf8")
    assert "Output layer of llama" in page
    assert 'id="attention"' in page
    document = json.loads((tmp_path / "results.json").read_text(encoding="utf8"))
    del document["attention"]
    (tmp_path / "results.json").write_text(json.dumps(document), encoding="utf8")
    assert results.load(tmp_path / "results.json")[0].attention is None


def test_the_command_on_a_model_without_attention(
    tiny_checkpoint: Build, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tiny_checkpoint("mamba"), text, tmp_path, "attention") == 2
    assert "has no attention" in capsys.readouterr().err
    assert run(tiny_checkpoint("mamba"), text, tmp_path, "attention", "spectrum") == 0
    document = json.loads((tmp_path / "results.json").read_text(encoding="utf8"))
    assert [one["question"] for one in document["missing"]][-1] == "attention"
    assert document["spectrum"] is not None


@pytest.mark.slow
def test_smollm2_separates_far_more_than_chance() -> None:
    from fullrank.fit.collect import tokenise
    from fullrank.models.anatomy import examine
    from fullrank.models.loading import load

    try:
        loaded = load(None)
    except FullrankError as error:
        pytest.skip(str(error))
    ids: Tensor = tokenise(loaded.tokenizer, [], tokens=1024, window=256, longest=None).ids[:2]
    found = attention(loaded.model, examine(loaded).output, ids, memory=1 << 30, loss_tokens=256)
    assert (found.layers, found.heads) == (30, 270)
    assert found.difference < 1e-4
    (sets,) = [one for one in found.by_size if (one.length, one.size) == (256, 16)]
    assert sets.separable.value > 3 * sets.separable_random.value
    assert all(one.exceeded == 0 for one in found.by_size)
