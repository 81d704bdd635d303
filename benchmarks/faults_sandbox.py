"""What the commands are tried on: a tiny model with its tokenizer, a text, a run, an upgraded model, curves,
tokens and results, made once; and the commands themselves, each with its good files."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import faults_child

TRAINING = [
    "--set", "body.hidden=8", "--set", "body.heads=2", "--set", "body.layers=1", "--set", "batch=2", "--set",
    "length=8", "--set", "data.bpe_size=300", "--set", "evaluate_tokens=256", "--set", "final_tokens=512",
    "--track", "none", "--device", "cpu",
]  # fmt: skip
ROOT = Path(__file__).parents[1]
LIMIT = 60.0
"""Seconds after which a command hangs."""


def write_model(directory: Path, *, vocabulary: int = 300, width: int = 32) -> None:
    """A llama of two layers with random weights, and a byte-level tokenizer."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    from fullrank.models.loading import quiet

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=min(vocabulary, 300), special_tokens=["<|endoftext|>"], show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )  # fmt: skip
    tokenizer.train_from_iterator([words(200)], trainer)
    end = "<|endoftext|>"
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=width, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, intermediate_size=2 * width, max_position_embeddings=256, bos_token_id=0,
        eos_token_id=0, tie_word_embeddings=True,
    )  # fmt: skip
    with quiet():
        LlamaForCausalLM(config).save_pretrained(directory)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=end, eos_token=end).save_pretrained(
        directory
    )


def words(count: int) -> str:
    lines = [
        f"the word {i % 37} of the text and {i % 11} more;" + ("\n" if i % 9 == 0 else "")
        for i in range(count)
    ]
    return " ".join(lines)


CURVES = "model,step,tokens,parameters,loss\n" + "".join(
    f"m{size},{step},{step * 1000},{size}000000,{2 + 3 / (1 + step / 100) + 1 / size:.4f}\n"
    for size in (10, 20)
    for step in range(100, 2100, 100)
)


@dataclass(frozen=True, kw_only=True)
class Files:
    """Good input of every kind, inside `place`."""

    place: Path

    @property
    def text(self) -> Path:
        return self.place / "text.txt"

    @property
    def model(self) -> Path:
        return self.place / "model"

    @property
    def run(self) -> Path:
        return self.place / "run"

    @property
    def upgraded(self) -> Path:
        return self.place / "upgraded"

    @property
    def curves(self) -> Path:
        return self.place / "curves.csv"

    @property
    def tokens(self) -> Path:
        return self.place / "tokens"

    @property
    def results(self) -> Path:
        return self.place / "diagnosed"

    @property
    def rows(self) -> Path:
        return self.place / "rows.jsonl"


def make(place: Path) -> Files:
    """All good files; takes a few seconds of training."""
    files = Files(place=place)
    place.mkdir(parents=True, exist_ok=True)
    files.text.write_text(words(4000), encoding="utf8")
    files.rows.write_text("".join(json.dumps({"text": words(40)}) + "\n" for _ in range(60)), encoding="utf8")
    files.curves.write_text(CURVES, encoding="utf8")
    files.tokens.mkdir()
    (files.tokens / "train.bin").write_bytes(bytes(range(200)) * 200)
    (files.tokens / "tokens.json").write_text('{"vocabulary_size": 60000, "end": 0}\n', encoding="utf8")
    write_model(files.model)
    for arguments in (
        train(files, files.run, steps=4),
        upgrade(files, files.upgraded),
        diagnose(files, files.results),
    ):
        ended = faults_child.run(arguments, place, limit=300)
        if ended.code:
            raise SystemExit(f"a good command failed: {' '.join(arguments)}\n{ended.errors}")
    shutil.rmtree(place / "cache")
    return files


def train(files: Files, out: Path, *, steps: int, more: Sequence[str] = ()) -> list[str]:
    return [
        "train", "transformer-tiny", "--data", str(files.text), "--out", str(out), *TRAINING, "--no-monitors",
        "--set", f"steps={steps}", *more,
    ]  # fmt: skip


def diagnose(files: Files, out: Path, questions: Sequence[str] = ("loss", "spectrum")) -> list[str]:
    return [
        "diagnose", str(files.model), "--text", str(files.text), "--out", str(out), "--only", *questions,
        "--tokens", "512", "--window", "64", "--device", "cpu",
    ]  # fmt: skip


def upgrade(files: Files, out: Path) -> list[str]:
    return [
        "upgrade", str(files.model), "--head", "mos", "--components", "2", "--train", str(files.text),
        "--out", str(out), "--tokens", "1024", "--window", "64", "--epochs", "3", "--seeds", "1",
        "--device", "cpu",
    ]  # fmt: skip


def corpus(files: Files, out: Path) -> list[str]:
    return [
        "corpus", "dimension", str(files.text), "--tokenizer", "words", "--out", str(out), "--tokens", "4000",
        "--order", "3", "--blocks", "4", "--workers", "1", "--memory", "1GB", "--constructions",
        "probability", "log",
    ]  # fmt: skip


COMMANDS: dict[str, Callable[[Files, Path], list[str]]] = {
    "train": lambda files, out: train(
        files, out, steps=40, more=["--set", "checkpoint_every=4", "--set", "evaluate_every=10"]
    ),
    "diagnose": lambda files, out: diagnose(
        files, out, ("loss", "spectrum", "anisotropy", "logprob_rank", "gradient")
    ),
    "upgrade": upgrade,
    "corpus": corpus,
}
"""Commands whose work is long enough to be killed in."""


def listing(place: Path, *, without: Sequence[Path] = ()) -> dict[str, tuple[int, int, int]]:
    """Every file below a place by what changes when it is written; those below `without` are left out."""
    left = {path.resolve() for path in without}
    found = {}
    for folder, folders, names in os.walk(place):
        here = Path(folder)
        folders[:] = [name for name in folders if (here / name).resolve() not in left]
        for name in names:
            path = here / name
            if path.resolve() in left:
                continue
            state = path.lstat()
            found[str(path.relative_to(place))] = (state.st_ino, state.st_size, state.st_mtime_ns)
    return found


def halves(out: Path) -> list[str]:
    """What a broken write leaves: hidden files other than a lock, and results that are no JSON."""
    found = []
    for path in sorted(out.rglob("*")) if out.is_dir() else []:
        if path.name.startswith(".") and path.name != ".lock" and path.is_file():
            found.append(str(path.relative_to(out)))
        elif path.name == "results.json" and path.is_file():
            try:
                json.loads(path.read_text(encoding="utf8"))
            except ValueError:
                found.append(str(path.relative_to(out)))
    return found


def shown(arguments: Sequence[str], place: Path) -> str:
    """The command as a person would type it in the sandbox."""
    return "fullrank " + " ".join(arguments).replace(f"{place}/", "")


def commit() -> str:
    """Of the source tree; what a run itself writes, figures and their page, is no change of it."""
    from fullrank.results import provenance

    found = provenance(seed=None, device="cpu").commit
    own = ["git", "status", "--porcelain", "--untracked-files=no", "--", ".", ":!results", ":!docs"]
    changed = subprocess.run(own, cwd=ROOT, capture_output=True, text=True).stdout.strip()
    return found if changed else found.removesuffix("+changes")


def only_one_thread() -> None:
    """A fork of many threads has one of them, and the locks of all: start again with one."""
    if os.environ.get("OMP_NUM_THREADS") != "1":
        os.environ.update(OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false")
        os.execv(sys.executable, [sys.executable, "-m", "benchmarks.faults", *sys.argv[1:]])
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
