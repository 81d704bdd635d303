"""Building by name: a mistake is answered with what came and what was expected; the documented code runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from fullrank.errors import FullrankError
from fullrank.heads import HEADS, Head, RowHead, build

DOCUMENT = Path(__file__).parents[2] / "docs" / "heads.md"


def test_builds_the_class_of_each_name(case: Any) -> None:
    head = case.build()
    assert type(head) is HEADS[case.name]
    assert head.name == case.name
    assert isinstance(head, Head)


def test_defaults_are_enough_but_for_the_inner_rank() -> None:
    for name in HEADS:
        options = {"rank": 2} if name == "low_rank" else {}
        head = build(name, hidden=8, vocab=20, **options)
        assert (head.hidden, head.width, head.vocab) == (8, 8, 20)
        assert head.decoder.bias is None


@pytest.mark.parametrize(
    ("typo", "meant"), [("mose", "mos"), ("softmx", "softmax"), ("sigmoid-softmax", None)]
)
def test_unknown_name_is_answered_with_the_nearest(typo: str, meant: str | None) -> None:
    with pytest.raises(FullrankError, match=rf"'{typo}'.*softmax, trunk") as raised:
        build(typo, hidden=8, vocab=20)
    assert meant is None or f"did you mean '{meant}'?" in str(raised.value)


def test_unknown_option_is_answered_with_the_known_ones() -> None:
    with pytest.raises(FullrankError, match=r"mos has no option experts.*components.*as_published"):
        build("mos", hidden=8, vocab=20, experts=4)


def test_missing_option_is_named() -> None:
    with pytest.raises(FullrankError, match="low_rank needs rank"):
        build("low_rank", hidden=8, vocab=20)


@pytest.mark.parametrize("which", ["hidden", "vocab", "width"])
def test_impossible_sizes_are_named(case: Any, which: str) -> None:
    # None is a possible width: the states' own.
    for size in (0, -3, 2.0, 0.5 if which == "width" else None, "8"):
        sizes = {"hidden": 6, "vocab": 11, **case.options, which: size}
        with pytest.raises(FullrankError, match=rf"{which}={re.escape(repr(size))}.*whole number >= 1"):
            build(case.name, **sizes)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("mos", {"components": 0}, r"components=0.*>= 1"),
        ("moc", {"components": 2.5}, r"components=2.5.*>= 1"),
        ("moss", {"components": -1}, r"components=-1.*>= 1"),
        ("trunk", {"components": 0}, r"components=0.*>= 1"),
        ("trunk", {"private": 0}, r"private=0.*>= 1"),
        ("trunk", {"private": 9}, r"private=9.*at most.*width=8"),
        ("trunk", {"private": 5, "width": 4}, r"private=5.*at most.*width=4"),
        ("low_rank", {"rank": 0}, r"rank=0.*>= 1"),
        ("low_rank", {"rank": 9}, r"rank=9.*at most.*8"),
        ("low_rank", {"rank": 5, "width": 4}, r"rank=5.*at most.*4"),
        ("plif", {"bins": 0}, r"bins=0.*>= 1"),
        ("plif", {"limit": 0.0}, r"limit=0.0.*limit > 0"),
        ("plif", {"limit": float("inf")}, r"limit=inf.*finite"),
        ("plif", {"spread": -1.0}, r"spread=-1.0.*spread >= 0"),
        ("doc", {"layers": ()}, r"layers=\(\).*hidden=8"),
        ("doc", {"layers": ((9, 1),)}, r"layers=\(\(9, 1\),\).*hidden=8"),
        ("doc", {"layers": ((8, 1), (0, 1))}, r"layers=.*\(0, 1\).*expected"),
        ("doc", {"layers": ((8, 1), (5, -1))}, r"layers=.*\(5, -1\).*expected"),
        ("doc", {"layers": ((8, 1.5),)}, r"layers=.*1.5.*whole"),
        ("doc", {"layers": ((8, 1, 1),)}, r"layers=.*expected whole \(width, contexts\)"),
        ("doc", {"layers": ((8, 0), (5, 0))}, r"at least one context"),
    ],
)
def test_impossible_options_are_named(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(FullrankError, match=message):
        build(name, hidden=8, vocab=20, **options)


def test_every_head_is_documented() -> None:
    table = [line for line in DOCUMENT.read_text(encoding="utf8").splitlines() if line.startswith("| `")]
    assert {line.split("`")[1] for line in table} == set(HEADS)


def test_the_documented_examples_run() -> None:
    blocks = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(encoding="utf8"), re.DOTALL)
    assert len(blocks) >= 2
    names: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, str(DOCUMENT), "exec"), names)
    own = names["own"]
    assert isinstance(own, RowHead)
    # Defined is known; here only as long as this test.
    assert HEADS.pop(own.name) is type(own)
    assert all(parameter.grad is not None for parameter in own.parameters())
