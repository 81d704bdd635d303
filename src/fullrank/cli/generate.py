"""`fullrank generate`: sample text from a trained run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro


@dataclass(frozen=True, kw_only=True)
class Generate:
    """Sample text from a training run; the text alone goes to the output, so that it can be piped.

    Example: fullrank generate runs/t --prompt "The first" --temperature 0.8
    """

    run: Annotated[Path, tyro.conf.Positional]
    """The --out of `fullrank train`."""
    prompt: str = ""
    """Text to go on from."""
    tokens: int = 100
    """Tokens to sample."""
    temperature: float = 1.0
    """Below 1 is more careful, 0 takes the most probable token."""
    top_k: int = 0
    """Sample from so many most probable tokens; 0 is all."""
    top_p: float = 1.0
    """Sample from the fewest tokens whose probabilities reach this in sum."""
    unknown: bool = False
    """Let the unknown word be sampled."""
    count: int = 1
    """Texts to sample, with one seed after the other."""
    seed: int = 0
    """Seed of the first text."""
    checkpoint: str = "best"
    """best by validation, last, or a step that was kept."""
    device: str = "auto"
    """cpu, cuda, mps, or auto: cuda where there is one."""


def generate(options: Generate) -> None:
    from fullrank.cli.progress import device_of
    from fullrank.errors import FullrankError
    from fullrank.train import generate as sampling
    from fullrank.train.folder import open_run

    if options.count < 1:
        raise FullrankError(f"--count is {options.count}, expected 1 or more")
    if options.seed < 0:
        raise FullrankError(f"--seed is {options.seed}, expected 0 or more")
    sampling.check(
        tokens=options.tokens, temperature=options.temperature, top_k=options.top_k, top_p=options.top_p
    )
    device = device_of(options.device)
    run = open_run(options.run, checkpoint=options.checkpoint, device=device)
    for number in range(options.count):
        text = sampling.generate(
            run.model,
            run.corpus.vocabulary,
            options.prompt,
            tokens=options.tokens,
            temperature=options.temperature,
            top_k=options.top_k,
            top_p=options.top_p,
            seed=options.seed + number,
            allow_unknown=options.unknown,
            device=device,
        )
        if number:
            print(f"\n--- seed {options.seed + number}")
        # At once: the next text may take a while.
        print(text, flush=True)
