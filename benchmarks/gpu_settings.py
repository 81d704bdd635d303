"""What the CUDA benchmark measures: the sizes of each part, and tiny ones to see anywhere that it runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

PARTS = ("layer", "stages", "step", "decode")

SHAPES = ((768, 50304), (768, 50257), (2048, 128256), (280, 33280), (4096, 128256))
"""(D, V) of GPT-2 small, padded to 64 and as it is, of a 1B Llama, of the mixture of softmaxes as published,
padded too, and of an 8B Llama."""

PRIVATE = {768: 64, 2048: 64, 280: 28, 4096: 64}
"""Width r that a component of the trunk head owns, by D."""


@dataclass(frozen=True, kw_only=True)
class StepSizes:
    """The model of the training steps; by default GPT-2 small."""

    layers: int = 12
    width: int = 768
    heads: int = 12
    vocab: int = 50304
    batch: int = 16
    context: int = 1024
    private: int = 64
    warm_up: int = 3
    repeats: int = 6
    """Timed steps of a variant in each of two sweeps."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    device: str
    out: Path
    only: tuple[str, ...] = PARTS
    shapes: tuple[tuple[int, int], ...] = SHAPES
    tokens: int = 8192
    components: tuple[int, ...] = (1, 4, 10)
    dtype: torch.dtype = torch.bfloat16
    repeats: int = 7
    """Counted rounds of the layer."""
    without: tuple[str, ...] = ()
    """Implementations to leave out."""
    deadline: float = 540.0
    """Seconds after which nothing more is started."""
    seed: int = 0
    compiler: str = "inductor"
    """Backend of torch.compile; none leaves out the compiler."""
    step: StepSizes = StepSizes()
    bodies: tuple[str, ...] = ("compiled", "eager")
    batches: tuple[int, ...] = (1, 8, 64)
    replays: int = 100

    @property
    def most(self) -> int:
        """K of what is measured for the largest mixture alone."""
        return max(self.components)

    def private(self, D: int) -> int:
        return PRIVATE.get(D, max(1, D // 12))


def tiny(
    *, out: Path, device: str = "cpu", only: tuple[str, ...] = PARTS, compiler: str = "none"
) -> Settings:
    """Everything in a few seconds: no figure of it means anything."""
    return Settings(
        device=device,
        out=out,
        only=only,
        shapes=((16, 192),),
        tokens=24,
        components=(1, 3),
        dtype=torch.float32 if device == "cpu" else torch.bfloat16,
        repeats=2,
        compiler=compiler,
        step=StepSizes(
            layers=1, width=16, heads=2, vocab=192, batch=2, context=8, private=4, warm_up=1, repeats=1
        ),
        batches=(1, 3),
        replays=2,
    )


def parse_shapes(words: tuple[str, ...]) -> tuple[tuple[int, int], ...]:
    """(D, V) from words such as 768x50304; none is all of `SHAPES`."""
    shapes = []
    for word in words:
        width, cross, vocab = word.partition("x")
        if not (cross and width.isdigit() and vocab.isdigit()):
            raise SystemExit(f"--shapes got {word!r}, expected DxV such as 768x50304")
        shapes.append((int(width), int(vocab)))
    return tuple(shapes) or SHAPES
