"""Collapse: a softmax in disguise collapses for nothing, and what is saved is plain transformers."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fullrank.errors import FullrankError
from fullrank.fit import comparison as fit
from fullrank.fit import states
from fullrank.fit.collect import tokenise
from fullrank.heads import Head, build
from fullrank.ops import SIGSOFTMAX
from fullrank.upgrade import folder, training
from fullrank.upgrade.closest import closest
from fullrank.upgrade.collapse import collapse
from fullrank.upgrade.plain import plain_model
from fullrank.upgrade.upgrade import upgrade

D, V, VOCABULARY = 6, 40, 101
SETTINGS = fit.Settings(epochs=12, rates=(0.5, 1.0))


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """Words w0 to w100."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {f"w{number}": number for number in range(VOCABULARY)}
    made = Tokenizer(models.WordLevel(vocab=words, unk_token="w1"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="w1")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "words.txt"
    draw = random.Random(0)
    path.write_text(" ".join(f"w{draw.randrange(2, VOCABULARY)}" for _ in range(900)), encoding="utf8")
    return path


def parts_for(count: int = 63, time: int = 32, tokens: int = V) -> states.Parts:
    generator = torch.Generator().manual_seed(0)
    targets = torch.randint(tokens, (count, time), generator=generator)
    return states.split(
        states.Part(
            states=(torch.randn(count, time, D, generator=generator),),
            targets=targets,
            ids=targets,
            blocks=torch.arange(count)[:, None].expand(count, time),
        )
    )


def mixture(*, same: bool) -> Head:
    """Two components: the same linear map of the state in both, or the state and its opposite."""
    generator = torch.Generator().manual_seed(1)
    head = build("mos", hidden=D, vocab=V, components=2, centred=False)
    with torch.no_grad():
        head.decoder.weight.normal_(generator=generator)
        difference = head.contexts.differences[0].weight
        turned = 0.5 * torch.randn(D, D, generator=generator)
        difference.copy_(torch.cat([turned, turned] if same else [torch.zeros(D, D), -2.0 * torch.eye(D)]))
    return head


def divergence(head: Head, weight: torch.Tensor, part: states.Part) -> float:
    """Mean KL(head || softmax) in fp64."""
    hidden = part.states[0].flatten(0, 1)
    with torch.no_grad():
        ours = head.double()([hidden.double()])
        head.float()
    plain = torch.log_softmax(hidden.double() @ weight.detach().double().T, dim=-1)
    return float((ours.exp() * (ours - plain)).sum(dim=-1).mean())


def test_a_softmax_in_disguise_collapses_for_nothing() -> None:
    head, parts = mixture(same=True), parts_for()
    found = closest(head, parts, settings=SETTINGS)
    assert found.start.value > 0.1
    assert found.cost.value < 2e-3
    assert found.upgraded_loss.value == pytest.approx(found.plain_loss.value, abs=0.02)


def test_what_is_a_softmax_already_costs_nothing_and_not_less() -> None:
    head = build("mos", hidden=D, vocab=V, components=2, centred=False)
    found = closest(head, parts_for(14), settings=fit.Settings(epochs=1, rates=(1e-6,)))
    assert 0.0 <= found.cost.low <= found.cost.value <= found.cost.high < 1e-6
    assert found.start.value >= 0.0


def test_a_true_mixture_costs_what_it_must() -> None:
    head, parts = mixture(same=False), parts_for()
    found = closest(head, parts, settings=SETTINGS)
    assert 0.05 < found.cost.low < found.cost.value < found.cost.high < found.start.value
    assert found.cost.value == pytest.approx(divergence(head, found.weight, parts.held_out), abs=1e-5)
    assert found.start.value == pytest.approx(divergence(head, head.decoder.weight, parts.held_out), abs=1e-5)


def test_rows_that_are_not_fitted_are_estimated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fit, "SMALL_VOCABULARY", 0)
    head, parts = mixture(same=True), parts_for(tokens=8)
    found = closest(head, parts, settings=fit.Settings(epochs=12, rates=(0.5,), rows=12))
    assert found.rows == 12
    # The map reaches the other rows as well.
    assert found.cost.value < 0.02
    assert found.cost.value == pytest.approx(divergence(head, found.weight, parts.held_out), abs=1e-5)


def test_a_constant_that_softmax_does_not_see_stays_out_of_the_bias() -> None:
    head = build("sigsoftmax", hidden=D, vocab=V, bias=True)
    assert head.pointwise is SIGSOFTMAX
    torch.nn.init.constant_(head.decoder.bias, 40.0)
    found = closest(head, parts_for(14), bias=True, settings=fit.Settings(epochs=1, rates=(0.01,)))
    assert found.bias is not None
    assert found.bias.abs().max() < 0.1
    assert found.cost.value < 1e-3


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "granite", "gptj", "opt projected"])
def test_what_is_saved_is_the_original_architecture(
    family: str, tiny_model: Callable[..., Any], tokenizer: Any, text: Path, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    original = tiny_model(family)
    kind = type(original)
    model = upgrade(original, "mos", components=2)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.lm_head.contexts.differences.parameters():
            parameter.copy_(0.02 * torch.randn(parameter.shape, generator=generator))
    settings = fit.Settings(tokens=640, window=32, epochs=3)
    plain, record = collapse(model, tokenizer, [text], settings=settings, cache=tmp_path / "states")
    assert record.architecture == kind.__name__
    assert record.text.held_out_tokens > 100
    assert record.cost.value <= record.start.value + 1e-6
    with folder.whole(tmp_path / "plain") as place:
        folder.write_model(plain, tokenizer, place)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "plain")
    assert type(loaded) is kind
    # The held-out part: what the head was not fitted on.
    ids = tokenise(tokenizer, [text], tokens=640, window=32, longest=None).ids[-5:]
    with torch.no_grad():
        before = torch.log_softmax(plain(input_ids=ids).logits, dim=-1)
        after = torch.log_softmax(loaded(input_ids=ids).logits, dim=-1)
        ours = model(input_ids=ids).logits
    torch.testing.assert_close(after, before, atol=1e-5, rtol=1e-5)
    # End to end, the cost is of the size that was reported.
    cost = (ours.exp() * (ours - after)).sum(dim=-1).mean().item()
    assert cost == pytest.approx(record.cost.value, rel=0.3, abs=1e-4)


@pytest.mark.slow
def test_a_process_without_this_package_loads_it(
    tiny_model: Callable[..., Any], tokenizer: Any, text: Path, tmp_path: Path
) -> None:
    model = upgrade(tiny_model("llama"), "trunk", components=2)
    settings = fit.Settings(tokens=512, window=32, epochs=1)
    plain, _ = collapse(model, tokenizer, [text], settings=settings, cache=tmp_path / "states")
    with folder.whole(tmp_path / "plain") as place:
        folder.write_model(plain, tokenizer, place)
    code = (
        "import sys, transformers as t; m = t.AutoModelForCausalLM.from_pretrained(sys.argv[1]); "
        "assert 'fullrank' not in sys.modules; print(type(m).__name__, m.config.tie_word_embeddings)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "plain")], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["LlamaForCausalLM", "False"]


def test_a_plain_model_is_refused(tiny_model: Callable[..., Any]) -> None:
    with pytest.raises(FullrankError, match="expected an upgraded model"):
        plain_model(tiny_model("llama"))


def test_directories_appear_whole_or_not_at_all(tmp_path: Path) -> None:
    out = tmp_path / "out"

    def fail() -> None:
        with folder.whole(out) as place:
            (place / "half").write_text("half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert list(tmp_path.iterdir()) == []
    out.mkdir()
    with folder.whole(out) as place:
        (place / "file").write_text("whole")
        assert list(out.iterdir()) == []
    assert (out / "file").read_text() == "whole"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    with pytest.raises(FullrankError, match="not empty"), folder.whole(out):
        pass
    assert (out / "file").read_text() == "whole"


def test_states_are_kept_checked_and_shared(
    tiny_model: Callable[..., Any], tokenizer: Any, text: Path, tmp_path: Path
) -> None:
    original = tiny_model("llama")
    settings = fit.Settings(tokens=512, window=32)
    calls: list[int] = []
    original.model.register_forward_hook(lambda *_: calls.append(1))

    def read(head: str, fingerprint: str = "a") -> training.Text:
        model = upgrade(original, head)
        calls.clear()
        return training.read_text(
            model, tokenizer, [text], settings=settings, cache=tmp_path, fingerprint=fingerprint
        )

    first = read("mos")
    ran = len(calls)
    assert ran == 4
    # Another head on the same body and text reads the same states.
    again = read("trunk")
    assert len(calls) == 0
    torch.testing.assert_close(again.parts.fit.states[0], first.parts.fit.states[0], rtol=0, atol=0)
    # A file that a crash or a bad disk has cut is made anew, alone.
    file = sorted(tmp_path.rglob("*.safetensors"))[1]
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    torch.testing.assert_close(
        read("mos").parts.held_out.states[0], first.parts.held_out.states[0], rtol=0, atol=0
    )
    assert len(calls) == 1
    assert file.read_bytes() == whole
    # Another model, or a head that reads more layers, has files of its own.
    read("mos", fingerprint="b")
    assert len(calls) == ran
    layers = read("doc").parts.fit.states
    assert len(calls) == ran
    assert len(layers) == 2
    assert not torch.equal(layers[0], layers[1])


def test_a_text_that_is_too_short_or_too_long_is_refused(
    tiny_model: Callable[..., Any], tokenizer: Any, text: Path, tmp_path: Path
) -> None:
    model = upgrade(tiny_model("llama"), "mos")
    short = tmp_path / "short.txt"
    short.write_text("w2 w3 w4", encoding="utf8")
    with pytest.raises(FullrankError, match="longer"):
        training.read_text(model, tokenizer, [short], settings=fit.Settings(), cache=tmp_path, fingerprint="")
    with pytest.raises(FullrankError, match="--memory"):
        training.read_text(
            model, tokenizer, [text], settings=fit.Settings(memory=1024), cache=tmp_path, fingerprint=""
        )
