"""Pages are written by nearly every command here, and most tests look at their words alone."""

from __future__ import annotations

import importlib.util

import pytest

from tests.tiny_checkpoints import tiny_checkpoint, tiny_tokenizer

__all__ = ["tiny_checkpoint", "tiny_tokenizer"]

BLANK = '<svg xmlns="http://www.w3.org/2000/svg" width="1" height="1"></svg>'


@pytest.fixture
def pictures() -> None:
    """For a test whose page is to have its pictures: one a command, and tests/report has the rest."""


@pytest.fixture(autouse=True)
def _pictures_are_blank(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A picture takes a tenth of a second, and a page has up to thirty."""
    if "pictures" not in request.fixturenames and importlib.util.find_spec("vl_convert") is not None:
        monkeypatch.setattr("vl_convert.vegalite_to_svg", lambda *of, **options: BLANK)
