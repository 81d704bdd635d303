"""A text made ready to train heads on: its states, the rows of W that move, and the rows drawn for the rest.

On a processor W is trained in the rows of tokens that occur and of those with the largest share of
probability; the others' part of the normaliser is estimated (`sampling`). On a GPU, for small vocabularies
and for heads that are not rows over one matrix, all of W is trained on the exact loss.

With a teacher (`teacher`) heads are trained, and learning rates chosen, on KL(teacher || head) in place of
the loss of the tokens that came.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import cast

import torch
from torch import Tensor

from fullrank.errors import FullrankError
from fullrank.fit import checkpoints, sampling
from fullrank.fit.states import Part, Parts
from fullrank.fit.teacher import Taught, Teacher
from fullrank.heads import Head
from fullrank.heads.rows import RowHead
from fullrank.models.output_layer import OutputLayer


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Setting:
    """One text and one start, ready to train any number of heads on."""

    plain: Head
    """The original output layer as a head that makes one row a token."""
    parts: Parts
    scales: tuple[float, ...]
    """Root mean square of each state."""
    sampled: tuple[sampling.Sampled, sampling.Sampled] | None
    """Of the fit and of the choosing part; None where training is exact."""
    matrix: bool
    """Whether W is trained."""
    limit: int
    """Bytes of a V-wide buffer."""
    align: float = 0.0
    """Weight of HistAlign's ranking loss in the training of a cache head."""
    matrix_rate: float | None = None
    """The learning rate of W and its bias, where it is known from a fit of them alone; None: as all else."""
    teacher: Teacher | None = None
    taught: tuple[Taught, Taught] | None = None
    """What it says of the fit and of the choosing part; None where training is exact, or without one."""

    @property
    def rows(self) -> int:
        if not self.matrix:
            return 0
        return self.plain.vocab if self.sampled is None else len(self.sampled[0].rows)

    @functools.cached_property
    def digest(self) -> str:
        """Of everything here that a training's numbers depend on."""
        tensors: list[Tensor] = [parameter for _, parameter in self.plain.named_parameters()]
        for part in (self.parts.fit, self.parts.choose, self.parts.held_out):
            tensors += [*part.states, part.targets, part.ids]
        for sampled in self.sampled or ():
            tensors += [sampled.rows, sampled.drawn]
        for taught in self.taught or ():
            tensors.append(taught.drawn)
        more = [] if self.teacher is None else self.teacher.digest()
        facts = (self.plain.softcap, self.matrix, self.limit, self.align, self.matrix_rate)
        return checkpoints.digest(*facts, *tensors, *more)


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
    teacher: Teacher | None = None,
) -> Setting:
    """Measure the states, choose the rows to train, and draw the others."""
    scales = tuple(float(state.double().square().mean().sqrt()) for state in parts.fit.states)
    if not all(scale > 0 for scale in scales):
        raise FullrankError("all states are zero: the model's last layer gives nothing to train a head on")
    sampled, taught = None, None
    if not exact:
        output = layer_of(plain)
        generator = torch.Generator(device=output.weight.device).manual_seed(seed)
        fit, choose = plain_rows(plain, parts.fit), plain_rows(plain, parts.choose)
        share = None if teacher is None else teacher.share(teacher.parts.fit, limit)
        chosen = sampling.rows_to_train(output, fit, parts.fit.targets.flatten(), rows, limit, share)
        seen = torch.unique(torch.cat([chosen, parts.choose.targets.flatten()]))
        sampled = (
            sampling.sample(output, fit, parts.fit.targets.flatten(), chosen, limit, generator),
            sampling.sample(output, choose, parts.choose.targets.flatten(), seen, limit, generator),
        )
        if teacher is not None:
            fits, chooses = (
                teacher.taught(part, drawn, output, rows_of, limit, generator)
                for part, drawn, rows_of in zip(
                    (teacher.parts.fit, teacher.parts.choose), sampled, (fit, choose), strict=True
                )
            )
            taught, sampled = (fits[0], chooses[0]), (fits[1], chooses[1])
    return Setting(
        plain=plain, parts=parts, scales=scales, sampled=sampled, matrix=matrix, limit=limit, align=align,
        teacher=teacher, taught=taught,
    )  # fmt: skip


def layer_of(plain: Head) -> OutputLayer:
    """A plain head's matrix, bias and cap."""
    bias = plain.decoder.bias
    return OutputLayer(
        weight=plain.decoder.weight.detach(), bias=None if bias is None else bias.detach(),
        pointwise=plain.pointwise, tokens=plain.vocab,
    )  # fmt: skip


@torch.no_grad()
def plain_rows(plain: Head, part: Part) -> Tensor:
    """[N, D] the rows that a plain head makes of some text."""
    rows, _ = cast(RowHead, plain).rows([part.states[0].flatten(0, 1)])
    return rows[:, 0]
