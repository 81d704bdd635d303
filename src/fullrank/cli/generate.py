"""`fullrank generate`: sample text from a run, an upgrade or any other model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import tyro


@dataclass(frozen=True, kw_only=True)
class Generate:
    """Sample text from a model; the text alone goes to the output, so that it can be piped.

    Example: fullrank generate runs/t --prompt "The first" --temperature 0.8
    """

    run: Annotated[str, tyro.conf.Positional]
    """The --out of `fullrank train` or `upgrade`, a transformers directory, a hub name or a .gguf file."""
    prompt: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """Text to go on from; several times for several texts, which are read together."""
    tokens: int = 100
    """Tokens to sample, at most: a model may end its text."""
    temperature: float = 1.0
    """Below 1 is more careful, 0 takes the most probable token."""
    beams: int = 1
    """With temperature 0: look for the most probable text with so many beams."""
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
    """Of a run: best by validation, last, or a step that was kept."""
    device: str = "auto"
    """cpu, cuda, mps, or auto: cuda where there is one."""


def generate(options: Generate) -> dict[str, Any]:
    from fullrank.cli.progress import device_of
    from fullrank.errors import FullrankError
    from fullrank.models import sampling
    from fullrank.train.loaded import load_any

    if options.count < 1:
        raise FullrankError(f"--count is {options.count}, expected 1 or more")
    if options.seed < 0:
        raise FullrankError(f"--seed is {options.seed}, expected 0 or more")
    settings = {name: getattr(options, name) for name in ("tokens", "temperature", "top_k", "top_p", "beams")}
    sampling.check(**settings)
    loaded = load_any(options.run, checkpoint=options.checkpoint, device=device_of(options.device))
    prompts = options.prompt or ("",)
    found = []
    for number in range(options.count):
        seed = options.seed + number
        texts = sampling.sample_each(loaded, prompts, seed=seed, allow_unknown=options.unknown, **settings)
        for place, text in enumerate(texts):
            if number or place:
                heads = [f"prompt {place + 1}"] * (len(prompts) > 1) + [f"seed {seed}"] * (options.count > 1)
                print(f"\n--- {', '.join(heads)}")
            # At once: the next text may take a while.
            print(text, flush=True)
            found.append({"prompt": prompts[place], "seed": seed, "text": text})
    return {"texts": found}
