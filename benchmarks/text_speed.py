"""How fast text becomes tokens, on how many cores, and how soon a second start has them?

    python -m benchmarks.text_speed enwik8.txt --cores 1 2 --out results/text_speed.json

A BPE tokenizer is trained first, and is not timed. Then, each in a process of its own that may use so many
cores, the whole text is read, hashed, split, tokenised and written into an empty cache; `copies` of the text,
each a file, make it as long as need be. A second start is a new process that finds the tokens in the cache:
from the call to the first token, without the imports, which every start has.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from fullrank.results import provenance, write_whole

SIZE = 16_384
STARTS = 3
"""Second starts, of which the fastest counts."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """Time the text layer."""

    text: Annotated[Path, tyro.conf.Positional]
    cores: tuple[int, ...] = (1, 2)
    copies: int = 4
    repeats: int = 1
    """The best of so many counts."""
    out: Path | None = None


def once(folder: Path, tokenizer: Path, cache: Path, cores: int) -> dict[str, Any]:
    """In a process of its own."""
    import threadpoolctl  # noqa: F401  (what every start has imported)

    from fullrank.text import store
    from fullrank.text.settings import DataConfig

    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cores])
    config = DataConfig(level="bpe", tokenizer=str(tokenizer))
    start = time.perf_counter()
    corpus = store.prepare([folder], config, cache, warn=lambda message: None)
    first = int(corpus.splits["train"].tokens[0])
    tokens = sum(len(split.tokens) for split in corpus.splits.values())
    return {"seconds": time.perf_counter() - start, "tokens": tokens, "first": first}


def apart(*arguments: object) -> dict[str, Any]:
    program = "import sys, json; from pathlib import Path; from benchmarks.text_speed import once; " + (
        "a = sys.argv[1:]; print(json.dumps(once(Path(a[0]), Path(a[1]), Path(a[2]), int(a[3]))))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *map(str, arguments)], capture_output=True, text=True, check=True
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main(config: Config) -> None:
    from fullrank.text.vocabulary import Bpe

    rows = []
    with tempfile.TemporaryDirectory() as place:
        work = Path(place)
        with config.text.open(encoding="utf8", errors="replace") as file:
            Bpe.train(iter([file.read(1 << 24)]), SIZE).tokenizer.save(str(work / "tokenizer.json"))
        for number in range(config.copies):
            (work / "text").mkdir(exist_ok=True)
            shutil.copyfile(config.text, work / "text" / f"{number}.txt")
        for cores in config.cores:
            taken, second = [], []
            for turn in range(config.repeats):
                cache = work / f"cache-{cores}-{turn}"
                arguments = (work / "text", work / "tokenizer.json", cache, cores)
                taken.append(apart(*arguments))
                # The disk may still be writing what the first start made.
                second += [apart(*arguments)["seconds"] for _ in range(STARTS)]
            best = min(taken, key=lambda one: one["seconds"])
            rate = best["tokens"] / best["seconds"]
            rows.append(
                {
                    "cores": cores, "tokens": best["tokens"], "seconds": best["seconds"],
                    "tokens_per_second": rate, "second_start_seconds": min(second),
                }
            )  # fmt: skip
            print(
                f"{cores:3d} cores: {best['tokens'] / 1e6:.1f} million tokens at {rate / 1e6:.2f} million a "
                f"second; second start {min(second):.2f} s",
                flush=True,
            )
    if config.out is not None:
        made = provenance(seed=None, device=f"{os.cpu_count()} cores")
        document = {
            "kind": "text_speed", "version": 1, "made": dataclasses.asdict(made), "text": config.text.name,
            "copies": config.copies, "bytes": config.copies * config.text.stat().st_size, "rows": rows,
        }  # fmt: skip
        write_whole(config.out, json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main(tyro.cli(Config))
