"""Run `fullrank diagnose`, `upgrade`, `train` and `eval` on tiny models in the environment of this Python.

    PYTHON scripts/smoke.py     for `make check-wheel` and `make test-lowest`, in environments of their own

It needs what the package itself depends on, and none of the development tools.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path

VOCABULARY, WIDTH = 300, 32


def write_text(path: Path) -> None:
    """A few thousand words with structure: each word limits which may follow."""
    draw = random.Random(0)
    words = [f"w{number}" for number in range(VOCABULARY - 10)]
    lines = []
    for _ in range(400):
        word = draw.randrange(len(words))
        line = []
        for _ in range(20):
            line.append(words[word])
            word = (word * 7 + draw.randrange(5)) % len(words)
        lines.append(" ".join(line))
    path.write_text("\n".join(lines), encoding="utf8")


def write_model(folder: Path) -> None:
    """A Llama of two layers with a word-level tokenizer."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    words = ["<unk>", "<eos>", *(f"w{number}" for number in range(VOCABULARY - 10))]
    inner = Tokenizer(
        models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>")
    )
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>", eos_token="<eos>").save_pretrained(
        folder
    )
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
        bos_token_id=1, eos_token_id=1,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_text(folder / "book.txt")
        write_model(folder / "model")

        def fullrank(*arguments: str) -> None:
            environment = {**os.environ, "FULLRANK_CACHE": str(folder / "cache")}
            command = [sys.executable, "-m", "fullrank", *arguments]
            done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
            print(f"{'ok' if done.returncode == 0 else 'FAILED'}: fullrank {' '.join(arguments)}", flush=True)
            if done.returncode:
                raise SystemExit(done.stdout + done.stderr)

        text = ("--text", "book.txt", "--tokens", "2000", "--window", "32")
        questions = ("--only", "loss", "spectrum", "logprob_rank", "unreachable")
        fullrank("diagnose", "model", *text, *questions, "--out", "diagnosis")
        fullrank("upgrade", "model", "--head", "mos", "--out", "upgraded")
        fullrank(
            "train",
            "transformer-tiny",
            "--data",
            "book.txt",
            "--head",
            "mos",
            "--set",
            "steps=4",
            "--out",
            "run",
        )
        fullrank("eval", "run")
        for result, wanted in (("diagnosis", "spectrum"), ("run", "valid")):
            stored = json.loads((folder / result / "results.json").read_text(encoding="utf8"))
            assert wanted in json.dumps(stored), f"{result}/results.json has no {wanted}"


if __name__ == "__main__":
    main()
