"""Descriptions from tables: the E2E NLG challenge, read from a folder that the user gives.

Novikova et al. 2017 (1706.09254), Dušek et al. 2020 (1901.07931); CC BY-SA 4.0, never shipped here. The
folder has `devset.csv` and `testset_w_refs.csv`, with columns mr and ref, one reference a row:

    "name[The Mill], eatType[pub], near[Café Rouge]","The Mill is a pub near Café Rouge."

All references of one meaning representation stand together. Training and development are both cut from the
devset, by meaning representation, so that none is in two; the test is as given. The devset has coffee shops
with English and Chinese food alone, the test pubs and restaurants of seven kitchens: what a model describes
there it has to copy from the prompt.

A prompt is one line of slots and values and the beginning of a second; the text ends at the next line's end:

    name: The Mill, type: pub, near: Café Rouge
    In words: The Mill is a pub near Café Rouge.
"""

from __future__ import annotations

import csv
import dataclasses
import random
import re
from collections.abc import Sequence
from pathlib import Path

from fullrank.errors import FullrankError

FILES = {"devset": "devset.csv", "test": "testset_w_refs.csv"}
SLOTS = {
    "name": "name",
    "eatType": "type",
    "food": "food",
    "priceRange": "price range",
    "customer rating": "customer rating",
    "area": "area",
    "familyFriendly": "family friendly",
    "near": "near",
}
"""What a slot is called in the file and in a prompt, in the order of a prompt."""
DEVELOPMENT = 0.2
"""Share of the devset's meaning representations."""
CUE = "In words:"
_SLOT = re.compile(r"\s*([^\[\],][^\[\]]*)\[([^\[\]]*)\]\s*(?:,|$)")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Description:
    """A meaning representation and what people wrote for it."""

    slots: dict[str, str]
    """Values by the file's names of slots, in the order of a prompt."""
    references: tuple[str, ...]

    @property
    def prompt(self) -> str:
        values = ", ".join(f"{SLOTS[slot]}: {value}" for slot, value in self.slots.items())
        return f"{values}\n{CUE}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Restaurants:
    train: tuple[Description, ...]
    development: tuple[Description, ...]
    test: tuple[Description, ...]

    @property
    def places(self) -> tuple[str, ...]:
        """All names of places, whatever they are of: one that a prompt lacks and its text has is invented."""
        every = (*self.train, *self.development, *self.test)
        return tuple(
            sorted({one.slots[slot] for one in every for slot in ("name", "near") if slot in one.slots})
        )


def read(directory: Path, *, seed: int = 0) -> Restaurants:
    """The three splits; the seed draws which of the devset are development."""
    devset, test = (_file(directory / name) for name in FILES.values())
    order = list(devset)
    random.Random(seed).shuffle(order)
    held = max(1, round(DEVELOPMENT * len(order)))
    if held >= len(order):
        raise FullrankError(
            f"{directory / FILES['devset']} has {len(order)} meaning representations, expected 2 or more: "
            "some to train on and some for development"
        )
    return Restaurants(train=tuple(order[held:]), development=tuple(order[:held]), test=tuple(test))


def continuation(text: str) -> str:
    """What a model wrote behind a prompt, to the end of its line."""
    return text.strip("\n").split("\n")[0].strip() if text.strip() else ""


def parse(meaning: str) -> dict[str, str]:
    """Slots of a meaning representation, in the order of a prompt."""
    found: dict[str, str] = {}
    place = 0
    while place < len(meaning):
        match = _SLOT.match(meaning, place)
        if match is None:
            raise FullrankError(
                f"{meaning[:80]!r} is no meaning representation, expected slot[value], slot[value]"
            )
        slot = "customer rating" if match[1].strip() == "rating" else match[1].strip()
        if slot not in SLOTS:
            raise FullrankError(
                f"{meaning[:80]!r} has the slot {slot!r}, expected some of {', '.join(SLOTS)}"
            )
        found[slot] = match[2].strip()
        place = match.end()
    if not found:
        raise FullrankError("a meaning representation is empty, expected slot[value], slot[value]")
    return {slot: found[slot] for slot in SLOTS if slot in found}


def _file(path: Path) -> Sequence[Description]:
    try:
        with open(path, encoding="utf8", newline="") as opened:
            rows = csv.DictReader(opened)
            if not {"mr", "ref"} <= set(rows.fieldnames or ()):
                raise FullrankError(
                    f"{path} has columns {', '.join(rows.fieldnames or ()) or 'none'}, expected mr and ref"
                )
            references: dict[tuple[tuple[str, str], ...], list[str]] = {}
            for row in rows:
                try:
                    slots = parse(row["mr"] or "")
                except FullrankError as error:
                    raise FullrankError(f"{path}, line {rows.line_num}: {error}") from error
                if not (row["ref"] or "").strip():
                    raise FullrankError(f"{path}, line {rows.line_num}: the reference is empty")
                references.setdefault(tuple(slots.items()), []).append(" ".join(row["ref"].split()))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise FullrankError(
            f"{path} cannot be read ({error}): give --data the folder of the E2E NLG challenge, with "
            f"{' and '.join(FILES.values())}"
        ) from error
    if not references:
        raise FullrankError(f"{path} has no rows, expected meaning representations and references")
    return [Description(slots=dict(slots), references=tuple(texts)) for slots, texts in references.items()]
