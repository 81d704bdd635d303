"""Stories with names: every mention is where it says, and only the first of each is no repetition."""

import re

from fullrank.studies import names


def test_mentions_are_where_they_say() -> None:
    for story in names.stories(5, seed=2):
        seen: set[str] = set()
        for mention in story.mentions:
            name = story.text[mention.start : mention.end]
            assert re.fullmatch(r"[A-Z][a-z]+( [A-Z][a-z]+)?", name)
            assert mention.repeated == (name in seen)
            seen.add(name)
        assert len(seen) == 4
        assert sum(mention.repeated for mention in story.mentions) > len(story.mentions) / 2
        assert sum(len(re.findall(re.escape(name), story.text)) for name in seen) == len(story.mentions)
        assert "{" not in story.text
        assert "  " not in story.text


def test_no_name_is_in_two_stories() -> None:
    found = [{one.text[mention.start : mention.end] for mention in one.mentions} for one in names.stories(8)]
    assert len(set.union(*found)) == sum(map(len, found))
    assert names.stories(2, seed=1) == names.stories(2, seed=1) != names.stories(2, seed=3)
