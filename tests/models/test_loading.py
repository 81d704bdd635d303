"""Loading: what a directory, a name or an object becomes, and a sentence for everything wrong with it."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import shutil
import socket
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from fullrank.errors import FullrankError
from fullrank.models import loading
from fullrank.models import model_files as checkpoint

TinyModel = Callable[..., Path]

FAMILIES = (
    ("llama", {}, True),
    ("llama", {"tie_word_embeddings": False}, False),
    ("gpt2", {}, True),
    ("gpt_neox", {}, False),
    ("opt", {}, True),
    ("opt", {"word_embed_proj_dim": 16}, True),
    ("gemma2", {}, True),
    ("gemma3_text", {}, True),
    ("gemma4_text", {}, True),
    ("cohere", {}, True),
    ("granite", {}, False),
    ("qwen3", {}, False),
    ("mistral", {}, False),
    ("mamba", {}, True),
    ("phi", {}, False),
    ("bloom", {}, True),
    ("mpt", {}, True),
)


@pytest.fixture
def copied(tiny_checkpoint: TinyModel, tmp_path: Path) -> Callable[..., Path]:
    """A tiny model that the test may spoil."""

    def copy(family: str = "llama", **changes: Any) -> Path:
        return Path(shutil.copytree(tiny_checkpoint(family, **changes), tmp_path / "spoiled"))

    return copy


def change_config(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def change_weights(directory: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    path = directory / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def pickled(directory: Path, name: str = "pytorch_model.bin") -> None:
    path = directory / "model.safetensors"
    torch.save(load_file(path), directory / name)
    path.unlink()


def refused(match: str, model: str | Path, **options: Any) -> str:
    """The message of the error that loading must end in; one line, and silent on the way."""
    out, err = io.StringIO(), io.StringIO()
    with (
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        pytest.raises(FullrankError, match=match) as caught,
    ):
        loading.load(model, **options)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 700
    assert out.getvalue() == err.getvalue() == ""
    return message


@pytest.mark.parametrize(("family", "changes", "tied"), FAMILIES)
def test_families_load_as_they_were_saved(
    family: str, changes: dict[str, Any], tied: bool, tiny_checkpoint: TinyModel
) -> None:
    directory = tiny_checkpoint(family, **changes)
    loaded = loading.load(directory)
    assert (loaded.name, loaded.source, loaded.storage, loaded.notes) == (family, "directory", "float32", ())
    assert not loaded.model.training
    assert not any(weight.requires_grad for weight in loaded.model.parameters())
    assert loaded.model.config.tie_word_embeddings == tied
    # In some versions of transformers gpt_neox has two names for its output matrix, in file and model.
    weights = {name.replace("embed_out", "lm_head"): item for name, item in loaded.model.state_dict().items()}
    for name, tensor in load_file(directory / "model.safetensors").items():
        assert torch.equal(tensor, weights[name.replace("embed_out", "lm_head")])
    tokens = loaded.tokenizer("the sea shells", return_tensors="pt")["input_ids"]
    with loading.quiet():
        assert torch.isfinite(loaded.model(input_ids=tokens).logits).all()


@pytest.mark.parametrize(
    ("family", "name"), [("mistral", "lm_head.weight"), ("gpt_neox", "embed_out.weight")]
)
def test_dtype_of_the_model_and_of_the_file_are_told_apart(
    family: str, name: str, copied: Callable[..., Path]
) -> None:
    directory = copied(family)

    def narrow(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name] = tensors[name].to(torch.bfloat16)

    change_weights(directory, narrow)
    loaded = loading.load(directory)
    assert loaded.storage == "bfloat16"
    assert loaded.model.get_output_embeddings().weight.dtype == torch.float32
    half = loading.load(str(directory), dtype=torch.float16)
    assert half.model.get_output_embeddings().weight.dtype == torch.float16
    assert half.storage == "bfloat16"


def test_storage_is_found_in_shards_and_without_prefix(copied: Callable[..., Path]) -> None:
    directory = copied("gpt2")
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    # As the first GPT-2 checkpoints are: the body's names, and the masks that it needed then.
    tensors = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    tensors["wte.weight"] = tensors["wte.weight"].to(torch.float16)
    masks = {f"h.{layer}.attn.bias": torch.ones(1, 1, 8, 8) for layer in range(2)}
    parts = {"one.safetensors": {"wte.weight": tensors.pop("wte.weight")}, "two.safetensors": tensors | masks}
    for name, part in parts.items():
        save_file(part, directory / name, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": {key: name for name, part in parts.items() for key in part}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    change_config(directory, architectures=["GPT2Model"])
    loaded = loading.load(directory)
    assert loaded.storage == "float16"
    assert loaded.notes == ()
    (directory / "two.safetensors").unlink()
    refused("two.safetensors", directory)


def test_a_directory_without_architectures_is_allowed(copied: Callable[..., Path]) -> None:
    directory = copied()
    change_config(directory, architectures=None)
    assert type(loading.load(directory).model).__name__ == "LlamaForCausalLM"


def test_unused_tensors_are_noted(copied: Callable[..., Path]) -> None:
    directory = copied()
    change_weights(directory, lambda tensors: tensors.update({"value_head.weight": torch.ones(1, 32)}))
    assert loading.load(directory).notes == ("1 tensor of the checkpoint not used: value_head.weight",)


def test_fingerprint_is_of_the_content(copied: Callable[..., Path], tiny_checkpoint: TinyModel) -> None:
    directory = copied()
    first = checkpoint.read(directory, allow_pickle=False)
    before = checkpoint.fingerprint(first)
    assert before == loading.load(tiny_checkpoint("llama")).fingerprint
    change_weights(directory, lambda tensors: tensors["model.norm.weight"].add_(1e-6))
    after = checkpoint.fingerprint(first)
    change_config(directory, rope_theta=20000.0)
    assert len({before, after, checkpoint.fingerprint(first)}) == 3


@pytest.mark.parametrize(
    ("readme", "license"),
    [
        ("---\nlicense: apache-2.0\n---\n# A model\n", "apache-2.0"),
        ("---\nlicense: [mit, apache-2.0]\n---\n", ""),
        ("---\nlicense: {a: *b}\n---\n", ""),
        ("---\n1: 2\n---\n", ""),
        ("---\n- license\n---\n", ""),
        ("---\nlicense: " + "[" * 5000 + "\n---\n", ""),
        ("license: mit", ""),
        ("", ""),
        (None, ""),
    ],
)
def test_the_license_is_what_its_readme_states(readme: str | None, license: str, tmp_path: Path) -> None:
    if readme is not None:
        (tmp_path / "README.md").write_text(readme)
    with loading.quiet():
        assert checkpoint.stated_license(tmp_path) == license
    if readme is None:
        os.mkfifo(tmp_path / "README.md")
        assert checkpoint.stated_license(tmp_path) == ""


def test_huge_files_are_hashed_by_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "HASHED_WHOLE", 1000)
    monkeypatch.setattr(checkpoint, "BLOCK", 100)
    monkeypatch.setattr(checkpoint, "SAMPLED_BLOCKS", 4)
    path = tmp_path / "weights"
    content = bytearray(5000)
    hashes = []
    for position in (None, 0, 4999, 1650, 1000):
        changed = content.copy()
        if position is not None:
            changed[position] = 1
        path.write_bytes(changed)
        hashes.append(checkpoint.content_hash(path))
    # First, last and sampled blocks are seen; what lies between is not.
    assert len(set(hashes[:4])) == 4
    assert hashes[4] == hashes[0]
    path.write_bytes(content + b"\0")
    assert checkpoint.content_hash(path) not in hashes


def test_objects_pass_the_same_checks(tiny_checkpoint: TinyModel, tiny_tokenizer: Any) -> None:
    model = loading.load(tiny_checkpoint("llama", tie_word_embeddings=False)).model
    first = loading.from_objects(model, tiny_tokenizer, name="mine")
    assert (first.name, first.source, first.storage, first.notes) == ("mine", "object", "float32", ())
    assert loading.from_objects(model, tiny_tokenizer).name == "llama"
    model.train()
    model.lm_head.weight[5, 5] += 1
    second = loading.from_objects(model, tiny_tokenizer)
    assert second.fingerprint != first.fingerprint
    assert not model.training
    assert "training mode" in second.notes[0]
    model.lm_head.weight[7, 0] = float("nan")
    with pytest.raises(FullrankError, match=r"NaN .*lm_head\.weight"):
        loading.from_objects(model, tiny_tokenizer)
    with torch.device("meta"):
        empty = type(model)(model.config)
    with pytest.raises(FullrankError, match="meta device"):
        loading.from_objects(empty, tiny_tokenizer)


def test_objects_of_other_kinds(tiny_checkpoint: TinyModel, tiny_tokenizer: Any) -> None:
    from transformers import LlamaForSequenceClassification

    model = loading.load(tiny_checkpoint("llama")).model
    with pytest.raises(FullrankError, match="got a Linear, expected a transformers PreTrainedModel"):
        loading.from_objects(torch.nn.Linear(2, 2), tiny_tokenizer)
    with pytest.raises(
        FullrankError, match="got a NoneType, expected a transformers PreTrainedTokenizerBase"
    ):
        loading.from_objects(model, None)
    for other in (model.model, LlamaForSequenceClassification(model.config)):
        with pytest.raises(FullrankError, match="expected a causal language model with its output layer"):
            loading.from_objects(other, tiny_tokenizer)


# What may be wrong with a path or a name.


@pytest.mark.parametrize(
    "path",
    [
        "./nowhere",
        "/nowhere/at/all",
        "~/nowhere-at-all",
        "~nobody/x",
        "a" * 300 + "/b/c",
        "nowhere/a/b",
        "x.gguf",
        "x.bin",
    ],
)
def test_missing_paths(path: str) -> None:
    refused("no such path", path)


def test_a_file_is_no_directory(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("text")
    refused("is a file, expected", tmp_path / "notes.txt")


@pytest.mark.parametrize("name", ["organisation/name-1.4b", "gpt2-of-no-one"])
def test_hub_names_without_a_hub(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from huggingface_hub import constants

    # A port that nobody listens on: the test asks no one, on machines with a network as well.
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    refused("not in the local cache and the hub could not be reached", name)


def test_a_hub_that_does_not_answer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from huggingface_hub import constants

    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
        monkeypatch.setattr(loading, "PATIENCE", 0.2)
        start = time.perf_counter()
        refused("the hub could not be reached", "organisation/name")
        assert time.perf_counter() - start < 20


def test_a_cached_model_needs_no_hub(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiny_checkpoint: TinyModel
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    cached = tmp_path / "models--organisation--name"
    shutil.copytree(tiny_checkpoint("llama"), cached / "snapshots" / ("c" * 40))
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("c" * 40)
    (cached / "snapshots" / ("c" * 40) / "README.md").write_text("---\nlicense: mit\n---\n")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    loaded = loading.load("organisation/name")
    assert (loaded.source, loaded.license) == ("hub", "mit")


@pytest.mark.parametrize(
    ("error", "match"),
    [
        ("RepositoryNotFoundError", "no model a/b at revision r"),
        ("GatedRepoError", "gated"),
        ("OSError", "reached"),
    ],
)
def test_answers_of_the_hub(error: str, match: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub
    from huggingface_hub import errors

    kind = getattr(errors, error, OSError)

    def answer(*arguments: Any, **options: Any) -> str:
        # Their constructors ask for the response of a server.
        raise kind.__new__(kind)

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *arguments, **options: None)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", answer)
    refused(match, "a/b", revision="r")


def test_a_hub_snapshot_is_a_directory(tiny_checkpoint: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    asked: dict[str, Any] = {}

    def answer(name: str, **options: Any) -> str:
        asked.update(options, name=name)
        return str(tiny_checkpoint("llama"))

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *arguments, **options: None)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", answer)
    said: list[str] = []
    loaded = loading.load("organisation/name", revision="step10", say=said.append)
    assert (loaded.name, loaded.source) == ("organisation/name", "hub")
    assert (asked["name"], asked["revision"]) == ("organisation/name", "step10")
    assert not {"*.py", "pytorch_model*.bin"} & set(asked["allow_patterns"])
    assert said == [
        "fetching organisation/name from the hub, where it is not in the local cache",
        "loading organisation/name",
    ]


def test_a_revision_is_of_a_hub_name(tiny_checkpoint: TinyModel) -> None:
    refused("revision 'step10' was asked for", tiny_checkpoint("llama"), revision="step10")


def test_devices_that_are_not_here(tiny_checkpoint: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    refused("torch sees none here", tiny_checkpoint("llama"), device="cuda")
    refused("no device that torch knows", tiny_checkpoint("llama"), device="gpu")


# What may be wrong in a directory.


def test_no_config(tmp_path: Path) -> None:
    refused(r"has no config\.json", tmp_path)


@pytest.mark.parametrize("content", ["{", "[1]", "\xff\xfe", ""])
def test_config_that_is_no_json_object(content: str, copied: Callable[..., Path]) -> None:
    directory = copied()
    (directory / "config.json").write_text(content, encoding="latin1")
    refused(r"config\.json (is not JSON|holds a list)", directory)


def test_unknown_model_types(copied: Callable[..., Path]) -> None:
    directory = copied()
    change_config(directory, model_type="never_heard_of")
    refused("'never_heard_of', which transformers .* upgrade", directory)
    change_config(directory, model_type=None)
    refused("names no model_type", directory)
    change_config(directory, model_type=["llama"])
    refused("does not know", directory)


def test_impossible_configurations(copied: Callable[..., Path]) -> None:
    directory = copied()
    change_config(directory, hidden_size="wide")
    refused("cannot be loaded", directory)


def test_no_weights(copied: Callable[..., Path]) -> None:
    directory = copied()
    (directory / "model.safetensors").unlink()
    refused("no weights", directory)


@pytest.mark.parametrize("keep", [0, 5, 300, -1])
def test_weights_cut_short(keep: int, copied: Callable[..., Path]) -> None:
    directory = copied()
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    refused(r"model\.safetensors is damaged or cut short", directory)


@pytest.mark.parametrize(
    "header",
    [b"\xff" * 64, b"[1]", b'{"a": 1}', b'{"a": {"dtype": "F32", "shape": [9], "data_offsets": [0, 36]}}'],
)
def test_weights_with_a_damaged_header(header: bytes, copied: Callable[..., Path]) -> None:
    directory = copied()
    (directory / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    refused("damaged or cut short", directory)


def test_pickles_need_permission(copied: Callable[..., Path], tiny_checkpoint: TinyModel) -> None:
    directory = copied()
    pickled(directory)
    refused(r"pytorch_model\.bin.*--allow-pickle", directory)
    loaded = loading.load(directory, allow_pickle=True)
    assert loaded.storage == "float32"
    expected = loading.load(tiny_checkpoint("llama")).model.state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in loaded.model.state_dict().items())


def test_pickles_of_other_names(copied: Callable[..., Path]) -> None:
    directory = copied()
    pickled(directory, "model.pth")
    refused(r"model\.pth.*--allow-pickle", directory)
    refused(r"expected pytorch_model\.bin", directory, allow_pickle=True)


class Bomb:
    def __reduce__(self) -> Any:
        return exec, ("import pathlib; pathlib.Path('exploded').touch()",)


def test_pickles_run_no_code_even_with_permission(
    copied: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    directory = copied()
    pickled(directory)
    torch.save({"lm_head.weight": Bomb()}, directory / "pytorch_model.bin")
    monkeypatch.chdir(tmp_path)
    refused("cannot be loaded", directory, allow_pickle=True)
    assert not (tmp_path / "exploded").exists()


CODE = """
import pathlib
pathlib.Path({trap!r}).touch()
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
class OwnConfig(LlamaConfig):
    model_type = "own"
class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
class OwnTokenizer(PreTrainedTokenizerFast):
    pass
"""


def test_code_of_a_checkpoint_runs_only_with_permission(
    copied: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import dynamic_module_utils

    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    # Whoever asks on the terminal gets an answer here, and the test the proof.
    monkeypatch.setattr("builtins.input", lambda *arguments: pytest.fail("asked on the terminal"))
    directory, trap = copied(), tmp_path / "ran"
    (directory / "own.py").write_text(CODE.format(trap=str(trap)))
    names = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"}
    change_config(directory, model_type="own", architectures=["OwnForCausalLM"], auto_map=names)
    refused("--trust-remote-code", directory)
    assert not trap.exists()
    assert type(loading.load(directory, trust_remote_code=True).model).__name__ == "OwnForCausalLM"
    assert trap.exists()
    trap.unlink()
    # A type that transformers knows is loaded with its own code, whatever else is offered.
    change_config(directory, model_type="llama", architectures=["LlamaForCausalLM"])
    settings = json.loads((directory / "tokenizer_config.json").read_text())
    settings |= {"auto_map": {"AutoTokenizer": [None, "own.OwnTokenizer"]}, "tokenizer_class": "OwnTokenizer"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    with contextlib.suppress(FullrankError):
        loading.load(directory)
    assert not trap.exists()


@pytest.mark.parametrize(
    ("family", "settings", "architecture", "match"),
    [
        ("bert", {}, "BertForMaskedLM", "is a BertForMaskedLM: expected a causal"),
        (
            "t5",
            {"d_model": 32},
            "T5ForConditionalGeneration",
            "encoder-decoder model .T5ForConditionalGeneration",
        ),
        ("vit", {}, "ViTForImageClassification", "is a ViTForImageClassification: expected a causal"),
        (
            "llama",
            {},
            "LlamaForSequenceClassification",
            "is a LlamaForSequenceClassification: expected a causal",
        ),
        ("vit", {}, None, "is a ViT: expected a causal"),
    ],
)
def test_other_kinds_of_models(
    family: str, settings: dict[str, Any], architecture: str | None, match: str, copied: Callable[..., Path]
) -> None:
    from transformers import AutoConfig

    directory = copied()
    config = AutoConfig.for_model(family, **settings)
    config.architectures = None if architecture is None else [architecture]
    config.save_pretrained(directory)
    refused(match, directory)


def test_a_body_without_its_head(copied: Callable[..., Path]) -> None:
    directory = copied(tie_word_embeddings=False)
    change_weights(directory, lambda tensors: tensors.pop("lm_head.weight"))
    change_config(directory, architectures=["LlamaModel"])
    refused(r"lacks 1 tensor .*\(lm_head\.weight\)", directory)
    change_config(directory, tie_word_embeddings=True)
    assert loading.load(directory).model.config.tie_word_embeddings


def test_missing_weights(copied: Callable[..., Path]) -> None:
    directory = copied()

    def drop(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if ".layers.1." in name]:
            del tensors[name]

    change_weights(directory, drop)
    message = refused(r"lacks 9 tensors of the model, which would be random .model\.layers\.1", directory)
    assert message.count("model.layers.1") == 3


def test_weights_of_another_shape(copied: Callable[..., Path]) -> None:
    directory = copied()
    change_config(directory, vocab_size=310)
    refused(r"embed_tokens\.weight as \(300, 32\), its config\.json makes it \(310, 32\)", directory)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_weights_that_are_not_finite(value: float, copied: Callable[..., Path]) -> None:
    directory = copied()

    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = value

    change_weights(directory, spoil)
    refused(r"NaN or infinite values in 1 tensor .*up_proj\.weight", directory)


def test_weights_that_overflow_in_half_precision(copied: Callable[..., Path]) -> None:
    directory = copied()
    change_weights(directory, lambda tensors: tensors["model.norm.weight"].fill_(1e6))
    assert loading.load(directory).model.dtype == torch.float32
    refused("as float16: .* load it in float32", directory, dtype=torch.float16)


def test_no_tokenizer(copied: Callable[..., Path]) -> None:
    directory = copied()
    (directory / "tokenizer.json").unlink()
    refused("has no tokenizer", directory)


def test_a_damaged_tokenizer(copied: Callable[..., Path]) -> None:
    directory = copied()
    (directory / "tokenizer.json").write_text("{}")
    refused("the tokenizer in .* cannot be loaded", directory)


def test_a_tokenizer_whose_settings_are_of_the_wrong_kind(copied: Callable[..., Path]) -> None:
    directory = copied()
    settings = directory / "tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"model_max_length": "long"}))
    refused("the tokenizer in .* cannot be loaded", directory)


def test_a_tokenizer_of_another_model(tiny_checkpoint: TinyModel) -> None:
    refused("ids up to 299, the output matrix has 290 rows", tiny_checkpoint("llama", vocab_size=290))


def test_special_tokens_beyond_the_matrix_are_noted(copied: Callable[..., Path], tiny_tokenizer: Any) -> None:
    directory = copied()
    tokenizer = type(tiny_tokenizer).from_pretrained(directory)
    tokenizer.add_tokens(["<image>"], special_tokens=True)
    tokenizer.save_pretrained(directory)
    assert loading.load(directory).notes == (
        "1 special token of the tokenizer without a row in the output matrix: <image>",
    )


def test_words_added_beyond_the_matrix_are_refused(copied: Callable[..., Path], tiny_tokenizer: Any) -> None:
    directory = copied()
    tokenizer = type(tiny_tokenizer).from_pretrained(directory)
    tokenizer.add_tokens(["the whole of it"])
    tokenizer.save_pretrained(directory)
    refused("ids up to 300, the output matrix has 300 rows", directory)


def test_padding_rows_are_fine(tiny_checkpoint: TinyModel) -> None:
    assert loading.load(tiny_checkpoint("llama", vocab_size=320)).notes == ()


@pytest.mark.parametrize(
    "settings",
    [
        {"quant_method": "bitsandbytes", "load_in_4bit": True},
        {"quant_method": "gptq", "bits": 4},
        {"quant_method": "awq", "bits": 4},
    ],
)
def test_quantised_without_the_library(settings: dict[str, Any], copied: Callable[..., Path]) -> None:
    directory = copied()
    change_config(directory, quantization_config=settings)
    message = refused("cannot be loaded|does not fit", directory)
    assert str(settings["quant_method"]) in message


def test_quantisation_has_a_name(tiny_checkpoint: TinyModel) -> None:
    config = loading.load(tiny_checkpoint("llama")).model.config
    assert loading._quantisation(config) == ""
    config.quantization_config = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    assert loading._quantisation(config) == "bitsandbytes 4-bit"
    config.quantization_config = {"quant_method": "fp8"}
    assert loading._quantisation(config) == "fp8"


@pytest.mark.parametrize(
    "error", [MemoryError(), torch.OutOfMemoryError("CUDA out of memory.\nTried to ...")]
)
def test_out_of_memory(error: Exception, tiny_checkpoint: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers

    def fail(*arguments: Any, **options: Any) -> Any:
        raise error

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", fail)
    refused("does not fit into memory: use a smaller dtype", tiny_checkpoint("llama"))


def test_long_messages_of_libraries_are_cut() -> None:
    assert checkpoint.first_line(ValueError("one\ntwo")) == "one"
    assert checkpoint.first_line(ValueError("")) == "ValueError"
    assert len(checkpoint.first_line(ValueError("long " * 200))) == 300


# What loading leaves behind.


def test_quiet_puts_everything_back() -> None:
    from huggingface_hub.utils import are_progress_bars_disabled
    from transformers.utils import logging as transformers_logging

    transformers_logging.enable_progress_bar()
    transformers_logging.set_verbosity(logging.WARNING)
    before = (transformers_logging.get_verbosity(), are_progress_bars_disabled(), warnings.filters[:])
    with contextlib.suppress(KeyError), loading.quiet():
        assert transformers_logging.get_verbosity() == logging.CRITICAL
        assert not transformers_logging.is_progress_bar_enabled()
        warnings.warn("not heard", UserWarning, stacklevel=1)
        raise KeyError
    assert transformers_logging.is_progress_bar_enabled()
    assert before == (transformers_logging.get_verbosity(), are_progress_bars_disabled(), warnings.filters[:])


def test_loading_is_silent(tiny_checkpoint: TinyModel, capfd: pytest.CaptureFixture[str]) -> None:
    loading.load(tiny_checkpoint("mamba"))
    assert capfd.readouterr() == ("", "")
