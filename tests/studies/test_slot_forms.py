"""What a text says of a table, by hand."""

from __future__ import annotations

import pytest

from fullrank.studies.data_to_text import SLOTS
from fullrank.studies.slot_forms import FORMS, PLACES, look

TABLE = {
    "name": "The Vaults", "eatType": "pub", "food": "French", "priceRange": "less than £20",
    "customer rating": "3 out of 5", "area": "riverside", "familyFriendly": "no",
    "near": "Raja Indian Cuisine",
}  # fmt: skip
PLACES_KNOWN = ("The Vaults", "Raja Indian Cuisine", "Café Rouge", "The Mill")


def test_all_slots_have_forms() -> None:
    assert {*FORMS, *PLACES} == set(SLOTS)


def test_everything_is_said() -> None:
    text = (
        "Near Raja Indian Cuisine, by the river, the Vaults is a cheap French pub of 3 out of 5 stars. It is "
        "not family-friendly."
    )
    found = look(text, TABLE, PLACES_KNOWN)
    assert found.realised == tuple(TABLE)
    assert found.missing == found.invented == ()
    marked = [text[start:stop] for start, stop, _ in found.spans]
    assert marked == [
        "Raja Indian Cuisine", "river", "the Vaults", "cheap", "French", "pub", "3 out of 5",
        "not family-friendly",
    ]  # fmt: skip
    assert {kind for _, _, kind in found.spans} == {"copied"}


def test_what_is_missing_and_what_is_made_up() -> None:
    text = "The Vaults is an expensive Italian coffee shop near Cafe Rouge, where children are welcome."
    found = look(text, TABLE, PLACES_KNOWN)
    assert found.realised == ("name",)
    assert set(found.invented) == {
        ("name", "Café Rouge"), ("priceRange", "high"), ("food", "italian"), ("eatType", "coffee shop"),
        ("familyFriendly", "yes"),
    }  # fmt: skip
    invented = [text[start:stop] for start, stop, kind in found.spans if kind == "invented"]
    assert invented == ["expensive", "Italian", "coffee shop", "Cafe Rouge", "children"]


@pytest.mark.parametrize(
    ("slot", "value", "text", "said"),
    [
        ("familyFriendly", "yes", "A family friendly place.", True),
        ("familyFriendly", "yes", "It is not suitable for children.", False),
        ("familyFriendly", "no", "Kids are not allowed.", True),
        ("familyFriendly", "no", "An adults-only pub.", True),
        ("familyFriendly", "no", "It is kid friendly.", False),
        ("priceRange", "£20-25", "Prices are £20 - £25.", True),
        ("priceRange", "moderate", "The price range is £20-25.", True),
        ("priceRange", "high", "It is inexpensive.", False),
        ("priceRange", "more than £30", "Expect more than £30.", True),
        ("customer rating", "high", "It has a high customer rating.", True),
        ("customer rating", "high", "It is in the high price range.", False),
        ("customer rating", "5 out of 5", "It has 1 out of 5 stars.", False),
        ("area", "city centre", "In the city center.", True),
        ("eatType", "restaurant", "A nice bistro.", True),
        ("near", "Café Sicilia", "close to cafe sicilia", True),
        ("name", "The Mill", "The Mills", False),
        ("food", "Indian", "Near Raja Indian Cuisine.", False),
    ],
)
def test_forms(slot: str, value: str, text: str, said: bool) -> None:
    assert (look(text, {slot: value}, PLACES_KNOWN).realised == (slot,)) == said


def test_a_restaurant_is_never_made_up_and_nothing_says_nothing() -> None:
    assert look("A restaurant.", {"eatType": "pub"}).invented == ()
    empty = look("", TABLE, PLACES_KNOWN)
    assert empty.missing == tuple(TABLE)
    assert empty.invented == empty.spans == ()


def test_places_in_a_text_survive_letters_that_become_two() -> None:
    text = "½ İstanbul ﬁne: The Mill"
    ((start, stop, kind),) = look(text, {"name": "The Mill"}).spans
    assert (text[start:stop], kind) == ("The Mill", "copied")
