"""Reading E2E NLG: hand-made files in its format, splits without overlap, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from fullrank.errors import FullrankError
from fullrank.studies import data_to_text

DEVSET = """mr,ref
"name[The Mill], eatType[pub], near[Café Rouge]","The Mill is a pub near Café Rouge."
"name[The Mill], eatType[pub], near[Café Rouge]",Near  Café Rouge is The Mill.
"name[Cotto], food[Chinese], customer rating[3 out of 5]","Cotto, Chinese, 3 out of 5."
"name[Cotto], area[riverside]",Cotto is by the river.
"name[Aromi], area[riverside]",Aromi is by the river.
"name[Zizzi], priceRange[£20-25]",Zizzi costs £20-25.
"""
TEST = """mr,ref
"area[city centre], name[Strada], familyFriendly[no]","Strada, in the centre, is for adults."
"name[Strada], rating[low]",Strada is poorly rated.
"name[Strada], rating[low]",The reviews of Strada are poor.
"""


def write(directory: Path, devset: str = DEVSET, test: str = TEST) -> Path:
    (directory / "devset.csv").write_text(devset, encoding="utf8")
    (directory / "testset_w_refs.csv").write_text(test, encoding="utf8")
    return directory


def test_splits_share_no_meaning(tmp_path: Path) -> None:
    found = data_to_text.read(write(tmp_path))
    assert (len(found.train), len(found.development), len(found.test)) == (4, 1, 2)
    meanings = [tuple(one.slots.items()) for one in (*found.train, *found.development)]
    assert len(set(meanings)) == 5
    mill = next(one for one in (*found.train, *found.development) if one.slots["name"] == "The Mill")
    assert mill.references == ("The Mill is a pub near Café Rouge.", "Near Café Rouge is The Mill.")
    assert data_to_text.read(tmp_path) == found
    assert found.places == ("Aromi", "Café Rouge", "Cotto", "Strada", "The Mill", "Zizzi")


def test_a_prompt_has_its_slots_in_one_order(tmp_path: Path) -> None:
    first, second = data_to_text.read(write(tmp_path)).test
    assert first.prompt == "name: Strada, area: city centre, family friendly: no\nIn words:"
    assert second.slots == {"name": "Strada", "customer rating": "low"}


def test_a_continuation_ends_with_its_line() -> None:
    assert data_to_text.continuation(" The Mill is a pub.\nname: Cotto") == "The Mill is a pub."
    assert data_to_text.continuation("\nThe Mill.") == "The Mill."
    assert data_to_text.continuation("  \n ") == ""


@pytest.mark.parametrize(
    ("devset", "message"),
    [
        ("a,b\n1,2\n", "columns a, b, expected mr and ref"),
        ("", "columns none"),
        ("mr,ref\n", "has no rows"),
        ("mr,ref\nThe Mill,text\n", "line 2.*no meaning representation"),
        ("mr,ref\ncolour[red],text\n", "line 2.*slot 'colour'"),
        ("mr,ref\nname[A],\n", "line 2: the reference is empty"),
        ("mr,ref\n,text\n", "line 2.*is empty"),
        ("mr,ref\nname[A],text\n", "expected 2 or more"),
    ],
)
def test_bad_files(devset: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(FullrankError, match=message):
        data_to_text.read(write(tmp_path, devset))


def test_no_files(tmp_path: Path) -> None:
    with pytest.raises(FullrankError, match=r"devset\.csv cannot be read.*give --data the folder"):
        data_to_text.read(tmp_path)
    write(tmp_path)
    (tmp_path / "testset_w_refs.csv").write_bytes(b"mr,ref\n\xff\xfe,b\n")
    with pytest.raises(FullrankError, match=r"testset_w_refs\.csv cannot be read"):
        data_to_text.read(tmp_path)
