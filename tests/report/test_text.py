from __future__ import annotations

import unicodedata
from xml.etree import ElementTree

from hypothesis import given
from hypothesis import strategies as st

from fullrank.report.text import shown, unique


def test_plain_text_stays_as_it_is() -> None:
    for text in ("", "softmax", " the", "naïve", "日本語", "مرحبا", "∑ = 3", "🙂", "e\u0301", "<b>&amp;"):
        assert shown(text) == text


def test_what_has_no_shape_is_escaped() -> None:
    assert shown("a\u202eb") == "a\\u202eb"
    assert shown("\u2066\u200b\ufeff") == "\\u2066\\u200b\\ufeff"
    assert shown("\x00\x1b[31m\x7f\x85") == "\\x00\\x1b[31m\\x7f\\x85"
    assert shown("\n\t\r") == "\\n\\t\\r"
    assert shown("\u2028\u00a0\u3000\u2800\u3164") == "\\u2028\\xa0\\u3000\\u2800\\u3164"
    assert shown("\ud800 \U000e0041 \ue000") == "\\ud800 \\U000e0041 \\ue000"


def test_accents_cannot_pile_up() -> None:
    assert shown("x" + "\u0301" * 5) == "x" + "\u0301" * 3 + "\\u0301" * 2
    assert shown("\u0301x") == "\\u0301x"


def test_long_text_ends_in_its_length() -> None:
    assert shown("y" * 10_240, 20) == "y" * 20 + "… (10,240 characters)"
    assert shown("y" * 20, 20) == "y" * 20
    # The limit counts what is seen, so escapes cannot stretch it.
    assert len(shown("\u202e" * 10_000, 60)) < 90


@given(st.text(st.characters(exclude_categories=()), max_size=200))
def test_any_text_becomes_a_short_line_of_shapes(text: str) -> None:
    line = shown(text)
    assert len(line) <= 80 + len("… (200 characters)")
    bad = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}
    assert not bad & {unicodedata.category(character) for character in line}
    line.encode("utf8")
    element = ElementTree.Element("a")
    element.text = line
    assert (ElementTree.fromstring(ElementTree.tostring(element)).text or "") == line


def test_equal_names_are_numbered() -> None:
    assert unique(["a", "b", "a", "a"]) == ["a", "b", "a (2)", "a (3)"]
    assert unique(["a", "a (2)", "a"]) == ["a", "a (2)", "a (3)"]
