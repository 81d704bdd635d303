"""Where caches go: what the user says, then the desktop's convention."""

from pathlib import Path

import pytest

from fullrank import results


def test_cache_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FULLRANK_CACHE", str(tmp_path / "own"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "shared"))
    assert results.cache_directory() == tmp_path / "own"
    monkeypatch.delenv("FULLRANK_CACHE")
    assert results.cache_directory() == tmp_path / "shared" / "fullrank"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert results.cache_directory() == Path.home() / ".cache" / "fullrank"
