"""A text made ready to train heads on: its states, the rows of W that move, and the rows drawn for the rest.

On a processor W is trained in the rows of tokens that occur and of those with the largest share of
probability; the others' part of the normaliser is estimated as in `fit.frozen`, by rows drawn from the
start's own distribution. On a GPU, for small vocabularies and for heads that are not rows over one matrix,
all of W is trained on the exact loss.
"""

from __future__ import annotations

import dataclasses
import functools

import torch

from fullrank.errors import FullrankError
from fullrank.fit import checkpoints, frozen
from fullrank.fit.states import Part, Parts
from fullrank.heads import Head
from fullrank.models.output_layer import OutputLayer


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Setting:
    """One text and one start, ready to train any number of heads on."""

    plain: Head
    """The original output layer as a head."""
    parts: Parts
    scales: tuple[float, ...]
    """Root mean square of each state."""
    sampled: tuple[frozen.Sampled, frozen.Sampled] | None
    """Of the fit and of the choosing part; None where training is exact."""
    matrix: bool
    """Whether W is trained."""
    limit: int
    """Bytes of a V-wide buffer."""
    align: float = 0.0
    """Weight of HistAlign's ranking loss in the training of a cache head."""

    @property
    def rows(self) -> int:
        if not self.matrix:
            return 0
        return self.plain.vocab if self.sampled is None else len(self.sampled[0].rows)

    @functools.cached_property
    def digest(self) -> str:
        """Of everything here that a training's numbers depend on."""
        decoder = self.plain.decoder
        tensors = [decoder.weight, *([] if decoder.bias is None else [decoder.bias])]
        for part in (self.parts.fit, self.parts.choose, self.parts.held_out):
            tensors += [*part.states, part.targets, part.ids]
        for sampled in self.sampled or ():
            tensors += [sampled.rows, sampled.drawn]
        return checkpoints.digest(self.plain.softcap, self.matrix, self.limit, self.align, *tensors)


def prepare(
    plain: Head,
    parts: Parts,
    *,
    rows: int,
    exact: bool,
    matrix: bool,
    limit: int,
    seed: int,
    align: float = 0.0,
) -> Setting:
    """Measure the states, choose the rows to train, and draw the others."""
    scales = tuple(float(state.double().square().mean().sqrt()) for state in parts.fit.states)
    if not all(scale > 0 for scale in scales):
        raise FullrankError("all states are zero: the model's last layer gives nothing to train a head on")
    sampled = None
    if not exact:
        weight, bias = plain.decoder.weight.detach(), plain.decoder.bias
        output = OutputLayer(
            weight=weight,
            bias=None if bias is None else bias.detach(),
            pointwise=plain.pointwise,
            tokens=plain.vocab,
        )
        fit, choose = _tokens(parts.fit), _tokens(parts.choose)
        generator = torch.Generator(device=weight.device).manual_seed(seed)
        chosen = frozen.rows_to_train(output, fit, rows, limit)
        seen = torch.unique(torch.cat([chosen, choose.targets]))
        sampled = (
            frozen.sample(output, fit, chosen, frozen.DRAWN, limit, generator),
            frozen.sample(output, choose, seen, 4 * frozen.DRAWN, limit, generator),
        )
    return Setting(
        plain=plain, parts=parts, scales=scales, sampled=sampled, matrix=matrix, limit=limit, align=align
    )


def _tokens(part: Part) -> frozen.Tokens:
    return frozen.Tokens(
        hidden=part.states[0].flatten(0, 1), targets=part.targets.flatten(), blocks=part.blocks.flatten()
    )
