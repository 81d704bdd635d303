"""What the pages say exists: links, commands, files; and the check sees what is wrong."""

import importlib.util
import re
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
_specification = importlib.util.spec_from_file_location("check_docs", ROOT / "scripts" / "check_docs.py")
assert _specification is not None
assert _specification.loader is not None
check_docs = importlib.util.module_from_spec(_specification)
sys.modules["check_docs"] = check_docs
_specification.loader.exec_module(check_docs)

GOOD = """# A page
[a heading](#two-words-and-more), [a file](docs/there.md#first), [a report](docs/gallery/small.html)

## Two words, and `more`
```
$ fullrank report runs/a --out page.html     # a comment
whatever it prints, fullrank report --nonsense
```

    T="fullrank train --set steps=3"
    $T transformer-tiny --data texts/; fullrank eval runs/a | tail -1

`fullrank report A B`, `fullrank eval` and `ops/there.py` and results/small.json: 0.25 and 12.5%.
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name in ("CONTRIBUTING.md", "CHANGELOG.md", "docs/there.md", "src/ops/there.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("# First\n")
    (tmp_path / "README.md").write_text(GOOD)
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "small.json").write_text('{"a": [0.2501, {"b": 0.1253}], "c": true}')
    return tmp_path


def everything(root: Path) -> list[str]:
    found = check_docs.broken_links(root) + check_docs.broken_commands(root) + check_docs.missing_files(root)
    return [str(place) for place in found + check_docs.doubtful_figures(root)]


def test_the_pages_of_this_repository() -> None:
    assert check_docs.broken_links(ROOT) == []
    assert check_docs.broken_commands(ROOT) == []
    assert check_docs.missing_files(ROOT) == []


def test_what_is_right_has_no_complaint(tree: Path) -> None:
    assert everything(tree) == []
    assert [words[0] for _, words in check_docs.commands(GOOD)] == ["report", "train", "eval", "report"]


@pytest.mark.parametrize(
    ("right", "wrong", "complaint"),
    [
        ("#two-words-and-more", "#two-words", "README.md:2: #two-words: no heading has that name"),
        ("there.md#first", "there.md#second", "README.md:2: docs/there.md#second: no heading has that name"),
        ("docs/there.md", "docs/gone.md", "README.md:2: docs/gone.md#first leads nowhere"),
        ("small.html", "large.html", "README.md:2: docs/gallery/large.html leads nowhere"),
        ("--out page", "--uot page", "README.md:6: fullrank report runs/a --uot page.html: "),
        ("--set steps", "--sett steps", "README.md:11: fullrank train --sett steps=3 transformer-tiny"),
        ("eval runs/a |", "evaluate runs/a |", "README.md:11: fullrank evaluate runs/a: "),
        ("report A B`", "report A --of B`", "README.md:13: fullrank report A --of B: "),
        ("ops/there.py", "ops/gone.py", "README.md:13: ops/gone.py is not there"),
        ("results/small", "results/gone", "README.md:13: results/gone.json is not there"),
        ("0.25 and", "0.26 and", "README.md:13: 0.26 is not in results/small.json"),
    ],
)
def test_what_is_wrong_is_named(tree: Path, right: str, wrong: str, complaint: str) -> None:
    assert right in GOOD
    (tree / "README.md").write_text(GOOD.replace(right, wrong, 1))
    (found,) = everything(tree)
    assert found.startswith(complaint)


@pytest.mark.parametrize("page", ["train", "loss", "theory"])
def test_the_python_of_a_first_page_runs(page: str) -> None:
    torch.manual_seed(0)
    text = (ROOT / "docs" / "start" / f"{page}.md").read_text(encoding="utf8")
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    if page == "theory":
        # A smaller table: the search for the best narrow softmax takes two seconds for the page's own.
        assert "randn(60, 8" in code
        code = code.replace("randn(60, 8", "randn(12, 8").replace("randn(8, 40", "randn(8, 14")
    exec(code, {})
