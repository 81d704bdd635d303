"""States: the ones the model has, every token once, nothing V wide, and files that a second run can trust."""

from __future__ import annotations

import copy
import errno
import itertools
import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from fullrank.errors import FullrankError
from fullrank.fit import batch_size
from fullrank.fit import collect as collect_module
from fullrank.fit.collect import States, Windows, collect, tokenise
from fullrank.fit.estimates import BLOCK
from fullrank.models.anatomy import Anatomy, examine
from fullrank.models.loading import Loaded, load

Build = Callable[..., Path]
MEMORY = 1 << 28
SENTENCE = "the shells that she sells are sea shells for sure when a model is small and language large"


def prose(characters: int, seed: int = 0, more: tuple[str, ...] = ()) -> str:
    draw = random.Random(seed)
    words = [draw.choice((*SENTENCE.split(), *more)) for _ in range(characters // 3)]
    return " ".join(words)[:characters]


def written(folder: Path, words: str, name: str = "text.txt") -> Path:
    path = folder / name
    path.write_text(words, encoding="utf8")
    return path


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("text"), prose(6000))


def number_of_tokens(tokenizer: Any, path: Path) -> int:
    return len(tokenizer(path.read_text(encoding="utf8"), add_special_tokens=False)["input_ids"])


@pytest.fixture(scope="module")
def with_bos(tiny_tokenizer: Any) -> Any:
    from tokenizers.processors import TemplateProcessing

    tokenizer = copy.deepcopy(tiny_tokenizer)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    return tokenizer


@pytest.fixture(scope="module")
def llama(tiny_checkpoint: Build) -> tuple[Loaded, Anatomy]:
    loaded = load(tiny_checkpoint("llama"))
    return loaded, examine(loaded)


@pytest.fixture
def windows(tiny_tokenizer: Any, text: Path) -> Windows:
    return tokenise(tiny_tokenizer, [text], tokens=640, window=64, longest=None)


class Calls:
    """Counts the batches that the model runs, and can stop one of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, fail_at: int | None = None) -> None:
        self.count, self.fail_at = 0, fail_at
        self.plain = collect_module.states
        monkeypatch.setattr(collect_module, "states", self)

    def __call__(self, model: Any, ids: Tensor) -> Tensor:
        if self.count == self.fail_at:
            raise KeyboardInterrupt
        self.count += 1
        return self.plain(model, ids)


def same(one: States, other: States) -> bool:
    return torch.equal(one.hidden, other.hidden) and torch.equal(one.layers, other.layers)


# Text to windows


@pytest.mark.parametrize("begins", [False, True], ids=["plain", "bos"])
def test_every_token_is_predicted_once(begins: bool, tiny_tokenizer: Any, with_bos: Any, text: Path) -> None:
    tokenizer = with_bos if begins else tiny_tokenizer
    found = tokenise(tokenizer, [text], tokens=640, window=64, longest=None)
    assert found.starts_with_bos is begins
    assert found.ids.shape[1] == 64
    ids = tiny_tokenizer(text.read_text(encoding="utf8"))["input_ids"]
    own = found.ids[:, 1:] if begins else found.ids
    count = found.ids.shape[0]
    assert count == 640 // own.shape[1]
    width = own.shape[1]
    cut = [tuple(ids[start : start + width]) for start in range(0, len(ids) - width + 1, width)]
    rows = [tuple(row) for row in own.tolist()]
    # Some of the text's windows, from all over it, each once, and not in its order.
    assert len(set(cut)) == len(cut) > count
    places = [cut.index(row) for row in rows]
    assert len(set(places)) == count
    assert places != sorted(places)
    assert min(places) < len(cut) / 4
    assert max(places) > 3 * len(cut) / 4
    every = tokenise(tokenizer, [text], tokens=len(ids), window=64, longest=None)
    assert sorted(map(tuple, (every.ids[:, 1:] if begins else every.ids).tolist())) == sorted(cut)
    if begins:
        assert (found.ids[:, 0] == tokenizer.bos_token_id).all()
        # With a token before it, the first one of a window is predicted as well.
        assert found.sizes.shape == own.shape
    assert found.sizes.shape == (count, 63)


@pytest.mark.parametrize(
    ("more", "begins"),
    [
        ((), False), (("café", "naïve", "Ærøskøbing"), True), (("🐚🐚", "日本語", "🧑‍🔬", "é"), False),
        (("🐚🐚", "日本語", "🧑‍🔬", "é"), True),
    ],
    ids=["ascii", "accents and bos", "emoji", "emoji and bos"],
)  # fmt: skip
def test_sizes_are_the_bytes_of_the_predicted_text(
    more: tuple[str, ...], begins: bool, tiny_tokenizer: Any, with_bos: Any, tmp_path: Path
) -> None:
    words = prose(5000, more=more)
    path = written(tmp_path, words)
    tokenizer = with_bos if begins else tiny_tokenizer
    found = tokenise(tokenizer, [path], tokens=512, window=32, longest=None)
    own = found.ids[:, 1:] if begins else found.ids
    # Every token of a byte-level tokenizer is so many bytes: one a letter of its spelling.
    bytes_of = {
        number: len(spelling) for spelling, number in tiny_tokenizer.get_vocab().items() if number != 0
    }
    lengths = torch.tensor([[bytes_of[int(token)] for token in row] for row in own])
    assert int(lengths.sum()) <= len(words.encode("utf8"))
    predicted = lengths if begins else lengths[:, 1:]
    assert (found.sizes >= 0).all()
    # A character of several tokens counts at its last one: windows that part one differ by that character.
    slack = 0 if not more else 3
    difference = (found.sizes.sum(dim=1) - predicted.sum(dim=1)).abs()
    assert int(difference.max()) <= 2 * slack
    assert abs(int(found.sizes.sum()) - int(predicted.sum())) <= slack * len(own)


def test_a_text_used_to_its_end_counts_all_its_bytes(with_bos: Any, tmp_path: Path) -> None:
    path = written(tmp_path, "🐚 é" * 64)
    count = number_of_tokens(with_bos, path)
    assert count % 64 == 0
    found = tokenise(with_bos, [path], tokens=count, window=count // 64 + 1, longest=None)
    assert found.ids[:, 1:].numel() == count
    assert int(found.sizes.sum()) == path.stat().st_size


def test_a_tokenizer_that_only_says_that_texts_begin_with_a_token(tiny_tokenizer: Any, text: Path) -> None:
    class Converted:
        is_fast, bos_token_id, add_bos_token = True, 7, True

        def __call__(self, words: str, **options: Any) -> Any:
            return tiny_tokenizer(words, **options)

    found = tokenise(Converted(), [text], tokens=640, window=64, longest=None)
    assert found.starts_with_bos
    assert (found.ids[:, 0] == 7).all()


def test_sizes_without_offsets_sum_to_the_bytes(tiny_tokenizer: Any, text: Path) -> None:
    class Slow:
        is_fast, bos_token_id = False, None

        def __call__(self, words: str, **options: Any) -> Any:
            options.pop("return_offsets_mapping", None)
            return {"input_ids": tiny_tokenizer(words, **options)["input_ids"]}

    exact = tokenise(tiny_tokenizer, [text], tokens=640, window=64, longest=None)
    shared = tokenise(Slow(), [text], tokens=640, window=64, longest=None)
    assert torch.equal(shared.ids, exact.ids)
    assert int(shared.sizes.sum()) == pytest.approx(int(exact.sizes.sum()), rel=0.05)


def test_several_files_are_one_text(tiny_tokenizer: Any, tmp_path: Path) -> None:
    files = [written(tmp_path, prose(1500, seed), name) for seed, name in enumerate(("a.txt", "b.txt"))]
    both = tokenise(tiny_tokenizer, files, tokens=1000, window=64, longest=None, in_order=True)
    assert both.sources == ("a.txt", "b.txt")
    swapped = tokenise(tiny_tokenizer, files[::-1], tokens=1000, window=64, longest=None, in_order=True)
    assert both.sha256 != swapped.sha256
    joined = "\n\n".join(path.read_text(encoding="utf8") for path in files)
    assert both.ids.flatten().tolist() == tiny_tokenizer(joined)["input_ids"][: both.ids.numel()]


@pytest.mark.parametrize("characters", [30_000, 300_000], ids=["read whole", "drawn from"])
def test_every_part_of_the_windows_is_of_all_files(
    characters: int, tiny_tokenizer: Any, tmp_path: Path
) -> None:
    """A long first file must not be all that is read, nor fit and judge lie in two files."""
    files = [written(tmp_path, f"{word} " * (characters // 4), f"{word}.txt") for word in ("she", "sea")]
    found = tokenise(tiny_tokenizer, files, tokens=2048, window=64, longest=None)
    second = tiny_tokenizer(" sea sea", add_special_tokens=False)["input_ids"][-1]
    of_second = (found.ids == second).any(dim=1)
    assert len(of_second) == 32
    # Halves of equal length: four sevenths of the windows to fit on, two to judge on.
    for part in (of_second, of_second[:18], of_second[-9:]):
        assert part.float().mean() == pytest.approx(0.5, abs=0.12)


def test_the_hash_is_of_what_was_used(tiny_tokenizer: Any, tmp_path: Path) -> None:
    words = prose(30_000)
    path = written(tmp_path, words)
    options: dict[str, Any] = {"tokens": 512, "window": 64, "longest": None}
    first = tokenise(tiny_tokenizer, [path], **options)
    used = tiny_tokenizer.decode(first.ids[0].tolist())[8:40]
    assert words.count(used) == 1
    # A letter of a window that was used, and of one that was not, by one of as many tokens.
    place = words.index(used)
    hashes = {}
    for shift in range(0, len(words) - 40, 1500):
        at = (place + shift) % (len(words) - 40)
        written(tmp_path, words[:at] + words[at : at + 12][::-1] + words[at + 12 :])
        again = tokenise(tiny_tokenizer, [path], **options)
        if torch.equal(again.ids, first.ids):
            hashes[shift] = again.sha256
        elif shift == 0:
            assert again.sha256 != first.sha256
    assert 0 not in hashes
    assert len(hashes) > 10
    assert set(hashes.values()) == {first.sha256}


def test_the_default_text_is_the_same_every_time(tiny_tokenizer: Any) -> None:
    first, second = (tokenise(tiny_tokenizer, [], tokens=512, window=64, longest=None) for _ in range(2))
    assert torch.equal(first.ids, second.ids)
    assert first.sha256 == second.sha256
    assert "Python" in first.sources[0]


def test_a_short_text_gets_shorter_windows(tiny_tokenizer: Any, tmp_path: Path) -> None:
    path = written(tmp_path, prose(1200))
    windows = tokenise(tiny_tokenizer, [path], tokens=7168, window=512, longest=None)
    total = number_of_tokens(tiny_tokenizer, path)
    assert windows.ids.shape[0] >= 8
    assert windows.ids.shape[1] == total // 8
    assert windows.ids.numel() > total - windows.ids.shape[1]


def test_a_lone_surrogate_is_replaced_and_said(tiny_tokenizer: Any, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "' + "plain words " * 400 + 'a\\ud800b"}\n')
    with pytest.warns(UserWarning, match=r"^1 places of the text were not valid Unicode"):
        tokenise(tiny_tokenizer, [path], tokens=10**6, window=64, longest=None)
    messages: list[str] = []
    options: dict[str, Any] = {"tokens": 10**6, "window": 64, "longest": None, "warn": messages.append}
    found = tokenise(tiny_tokenizer, [path], **options)
    path.write_text(json.dumps({"text": "plain words " * 400 + "a\ufffdb"}))
    assert torch.equal(found.ids, tokenise(tiny_tokenizer, [path], **options).ids)
    assert len(messages) == 1


def test_refusals_of_texts(tiny_tokenizer: Any, text: Path, tmp_path: Path) -> None:
    short = written(tmp_path, prose(200))
    total = number_of_tokens(tiny_tokenizer, short)
    for path, tokens, window, words in (
        (short, 7168, 512, f"has {total} tokens.*expected 256 or more: give a longer one"),
        (text, 100, 64, "100 tokens were asked for, expected 256"),
        (text, 512, 4, "windows of 4 tokens"),
    ):
        with pytest.raises(FullrankError, match=words):
            tokenise(tiny_tokenizer, [path], tokens=tokens, window=window, longest=None)


def test_very_many_tokens_mean_all_of_the_text(tiny_tokenizer: Any, text: Path) -> None:
    windows = tokenise(tiny_tokenizer, [text], tokens=10**13, window=64, longest=None)
    total = number_of_tokens(tiny_tokenizer, text)
    assert total - 64 < windows.ids.numel() <= total


def test_the_models_limit_bounds_the_window(tiny_tokenizer: Any, with_bos: Any, text: Path) -> None:
    for tokenizer in (tiny_tokenizer, with_bos):
        assert tokenise(tokenizer, [text], tokens=640, window=64, longest=24).ids.shape[1] == 24


def test_the_begin_token_can_be_asked_for_or_left_out(tiny_tokenizer: Any, with_bos: Any, text: Path) -> None:
    options: dict[str, Any] = {"tokens": 640, "window": 64, "longest": None}
    assert not tokenise(with_bos, [text], **options, bos=False).starts_with_bos
    named = copy.deepcopy(tiny_tokenizer)
    named.bos_token = "<|endoftext|>"
    assert not tokenise(named, [text], **options).starts_with_bos
    found = tokenise(named, [text], **options, bos=True)
    assert (found.ids[:, 0] == 0).all()
    assert torch.equal(found.ids, tokenise(with_bos, [text], **options).ids)
    named.bos_token = None
    with pytest.raises(FullrankError, match="no begin token: leave out --bos yes"):
        tokenise(named, [text], **options, bos=True)


# How many windows at once


@pytest.mark.parametrize("batch", [3, 64])
def test_any_number_of_windows_at_once_gives_the_same_files(
    batch: int, llama: tuple[Loaded, Anatomy], windows: Windows, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    loaded, anatomy = llama
    usual = collect(loaded.model, anatomy, windows, tmp_path / "usual", memory=MEMORY)
    calls = Calls(monkeypatch)
    found = collect(loaded.model, anatomy, windows, tmp_path / "other", memory=MEMORY, batch=batch)
    assert calls.count == -(-len(windows.ids) // batch)
    torch.testing.assert_close(found.hidden, usual.hidden, rtol=1e-5, atol=1e-6)
    names = [{path.relative_to(tmp_path / run) for path in (tmp_path / run).rglob("*.safetensors")}
             for run in ("usual", "other")]  # fmt: skip
    assert names[0] == names[1]
    assert len(names[0]) == 3
    # A second run believes them, however many windows it would have run at once.
    again = collect(loaded.model, anatomy, windows, tmp_path / "other", memory=MEMORY, batch=2)
    assert calls.count == -(-len(windows.ids) // batch)
    assert same(again, found)


def test_a_device_without_memory_gets_half_as_many(
    llama: tuple[Loaded, Anatomy], windows: Windows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded, anatomy = llama
    usual = collect(loaded.model, anatomy, windows, tmp_path / "usual", memory=MEMORY, batch=2)
    plain, sizes, said = collect_module.states, [], []

    def tight(model: Any, ids: Tensor) -> Tensor:
        sizes.append(len(ids))
        if len(ids) > room:
            raise torch.OutOfMemoryError("a page of statistics")
        return plain(model, ids)

    monkeypatch.setattr(collect_module, "states", tight)
    room = 2
    options: dict[str, Any] = {"memory": MEMORY, "batch": 8, "say": said.append}
    found = collect(loaded.model, anatomy, windows, tmp_path / "tight", **options)
    assert sizes == [8, 4, 2, 2, 2, 2, 2]
    assert same(found, usual)
    assert said == [f"out of memory: running the model on {size} windows at once" for size in (4, 2)]
    room = 0
    with pytest.raises(FullrankError, match="no memory for a single window: take a shorter --window"):
        collect(loaded.model, anatomy, windows, tmp_path / "none", **options)


def test_batches_are_as_large_as_memory_allows(
    llama: tuple[Loaded, Anatomy], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = llama[0].model
    window = 4 * 64 * (8 * model.config.hidden_size + 3 * model.config.intermediate_size)
    for memory, expected in ((4 * window - 4, 1), (8 * window, 2), (400 * window, 4), (0, 1)):
        assert batch_size.chosen(model, 64, memory) == expected
    assert batch_size.chosen(model, 64, 0, 9) == 9
    config = SimpleNamespace(hidden_size=4096, intermediate_size=14336)
    large = SimpleNamespace(device=torch.device("cuda:1"), dtype=torch.bfloat16, config=config)
    window = 2 * 512 * (8 * 4096 + 3 * 14336)
    for free, expected in ((2 * 7 * window + 1, 7), (10**12, 64), (window, 1)):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device, free=free: (free, 10**12))
        assert batch_size.chosen(large, 512, 1) == expected


# Windows to states


def test_states_and_layers_are_the_models(
    llama: tuple[Loaded, Anatomy], windows: Windows, tmp_path: Path
) -> None:
    loaded, anatomy = llama
    found = collect(loaded.model, anatomy, windows, tmp_path, memory=MEMORY)
    with torch.no_grad():
        own = loaded.model(input_ids=windows.ids, output_hidden_states=True).hidden_states
    count, length = windows.ids.shape
    torch.testing.assert_close(found.hidden, own[-1][:, :-1].flatten(0, 1), rtol=1e-5, atol=1e-6)
    assert torch.equal(found.targets, windows.ids[:, 1:].flatten())
    assert torch.equal(found.sizes, windows.sizes.flatten())
    assert torch.equal(found.windows, torch.arange(count).repeat_interleave(length - 1))
    assert torch.equal(found.positions, torch.arange(length - 1).repeat(count))
    assert found.layer_names == ("embedding", "block 1", "block 2", "output")
    sampled = found.layers.shape[1]
    assert sampled % count == 0
    rows = torch.arange(count).repeat_interleave(sampled // count)
    positions = found.layer_positions
    assert int(positions.min()) >= 1
    assert int(positions.max()) <= length - 2
    assert len(set(zip(rows.tolist(), positions.tolist(), strict=True))) == sampled
    for layer, expected in ((0, own[0]), (1, own[1]), (3, own[2])):
        torch.testing.assert_close(found.layers[layer], expected[rows, positions], rtol=1e-5, atol=1e-6)
    # What leaves the last block becomes the output through the final norm.
    normed = loaded.model.model.norm(found.layers[2])
    torch.testing.assert_close(normed, found.layers[3], rtol=1e-5, atol=1e-6)
    number = {(int(row), int(place)): index for index, (row, place) in enumerate(
        itertools.product(range(count), range(length - 1)))}  # fmt: skip
    at = torch.tensor([number[int(row), int(place)] for row, place in zip(rows, positions, strict=True)])
    assert torch.equal(found.layer_blocks, found.blocks[at])


def test_blocks_of_text_stay_inside_windows(
    llama: tuple[Loaded, Anatomy], tiny_tokenizer: Any, text: Path, tmp_path: Path
) -> None:
    loaded, anatomy = llama
    windows = tokenise(tiny_tokenizer, [text], tokens=1500, window=180, longest=None)
    found = collect(loaded.model, anatomy, windows, tmp_path, memory=MEMORY)
    pairs = set(zip(found.blocks.tolist(), found.windows.tolist(), strict=True))
    assert len(pairs) == len({block for block, _ in pairs}) == 2 * len(windows.ids)
    assert int(torch.bincount(found.blocks).max()) <= BLOCK


@pytest.mark.parametrize("family", ["gpt2", "bloom", "mpt", "mamba", "gemma2"])
def test_all_layers_of_other_families_are_seen(
    family: str, tiny_checkpoint: Build, windows: Windows, tmp_path: Path
) -> None:
    loaded = load(tiny_checkpoint(family))
    result = collect(loaded.model, examine(loaded), windows, tmp_path, memory=MEMORY)
    assert result.layer_names == ("embedding", "block 1", "block 2", "output")
    assert bool((result.layers.norm(dim=2) > 0).all())


def test_a_projection_before_the_matrix(tiny_checkpoint: Build, windows: Windows, tmp_path: Path) -> None:
    loaded = load(tiny_checkpoint("opt", word_embed_proj_dim=16))
    result = collect(loaded.model, examine(loaded), windows, tmp_path, memory=MEMORY)
    assert (result.hidden.shape[1], result.layers.shape[::2]) == (16, (3, 32))
    assert result.layer_names == ("embedding", "block 1", "block 2")
    assert bool((result.layers.norm(dim=2) > 0).all())
    with torch.no_grad():
        states = loaded.model(input_ids=windows.ids, output_hidden_states=True).hidden_states[-1]
    torch.testing.assert_close(result.hidden, states[:, :-1].flatten(0, 1), rtol=1e-5, atol=1e-6)


def test_the_output_matrix_is_never_multiplied(
    tiny_checkpoint: Build, windows: Windows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load(tiny_checkpoint("llama", tie_word_embeddings=False))
    anatomy = examine(loaded)

    def fail(states: Tensor) -> Tensor:
        raise AssertionError("logits were made")

    monkeypatch.setattr(loaded.model.lm_head, "forward", fail)
    assert len(collect(loaded.model, anatomy, windows, tmp_path, memory=MEMORY).hidden) == 10 * 63
    with pytest.raises(AssertionError, match="logits were made"):
        loaded.model(input_ids=windows.ids[:1])


def test_refusals_of_models(
    llama: tuple[Loaded, Anatomy], tiny_checkpoint: Build, windows: Windows, tmp_path: Path
) -> None:
    loaded, anatomy = llama
    where = tmp_path / "states"
    states = 4 * 10 * 63 * 32
    with pytest.raises(FullrankError, match="--memory"):
        collect(loaded.model, anatomy, windows, where, memory=states)
    assert not where.exists()
    # Short of memory, fewer positions are sampled before the run is refused.
    result = collect(loaded.model, anatomy, windows, where, memory=2 * states)
    assert result.layers.numel() * 4 <= states
    assert result.layers.shape[1] >= 20
    broken = load(tiny_checkpoint("llama"))
    broken_anatomy = examine(broken)
    with torch.no_grad():
        broken.model.get_input_embeddings().weight[windows.ids[9, 3]] = float("nan")
    with pytest.raises(FullrankError, match="--dtype float32"):
        collect(broken.model, broken_anatomy, windows, tmp_path / "broken", memory=MEMORY)
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(FullrankError, match="cannot be kept"):
        collect(loaded.model, anatomy, windows, tmp_path / "file", memory=MEMORY)
    assert (tmp_path / "file").read_text() == "in the way"
    windows.ids[3, 5] = 300
    with pytest.raises(FullrankError, match=r"token 300, but the output matrix has 300 rows"):
        collect(loaded.model, anatomy, windows, tmp_path / "absent", memory=MEMORY)
    assert not (tmp_path / "absent").exists()


# States to files and back


def test_a_second_run_reads_and_does_not_run(
    llama: tuple[Loaded, Anatomy], windows: Windows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded, anatomy = llama
    calls = Calls(monkeypatch)
    shares: list[float] = []
    first = collect(loaded.model, anatomy, windows, tmp_path, memory=MEMORY, progress=shares.append)
    assert calls.count == 3
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    second = collect(loaded.model, anatomy, windows, tmp_path, memory=MEMORY)
    assert calls.count == 3
    assert same(first, second)


def rewritten(change: Callable[[dict[str, Tensor]], object]) -> Callable[[Path], None]:
    """A file whose tensors were changed in place."""

    def rewrite(file: Path) -> None:
        tensors = {name: value.clone() for name, value in load_file(file).items()}
        change(tensors)
        save_file(tensors, file)

    return rewrite


DAMAGE: dict[str, Callable[[Path], object]] = {
    "cut": lambda file: file.write_bytes(file.read_bytes()[:-100]),
    "empty": lambda file: file.write_bytes(b""),
    "shape": rewritten(lambda tensors: tensors.update(hidden=tensors["hidden"][:, :-1].clone())),
    "name": rewritten(lambda tensors: tensors.pop("layers")),
    "value": rewritten(lambda tensors: tensors["hidden"][1, 2, 3].fill_(float("nan"))),
    "missing": Path.unlink,
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_made_again(
    damage: str, llama: tuple[Loaded, Anatomy], windows: Windows,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    loaded, anatomy = llama
    first = collect(loaded.model, anatomy, windows, tmp_path, memory=MEMORY)
    file = sorted(tmp_path.rglob("*.safetensors"))[1]
    content = file.read_bytes()
    DAMAGE[damage](file)
    calls = Calls(monkeypatch)
    second = collect(loaded.model, anatomy, windows, tmp_path, memory=MEMORY)
    assert calls.count == 1
    assert same(first, second)
    assert file.read_bytes() == content


def test_another_text_or_model_starts_anew_and_old_states_go(
    llama: tuple[Loaded, Anatomy], windows: Windows, tiny_checkpoint: Build, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    loaded, anatomy = llama
    other = load(tiny_checkpoint("mistral"))
    changed = Windows(**{**vars(windows), "ids": windows.ids.flip(0)})
    calls = Calls(monkeypatch)
    kept = []
    for model, build, chosen in (
        (loaded.model, anatomy, windows),
        (loaded.model, anatomy, changed),
        (other.model, examine(other), changed),
    ):
        collect(model, build, chosen, tmp_path, memory=MEMORY)
        (directory,) = tmp_path.iterdir()
        kept.append(directory.name)
    assert calls.count == 9
    assert len(set(kept)) == 3


def test_what_is_not_ours_stays(llama: tuple[Loaded, Anatomy], windows: Windows, tmp_path: Path) -> None:
    """`--out .` may find a directory called states that holds other things."""
    mine = tmp_path / "states" / "California"
    mine.mkdir(parents=True)
    (mine / "notes.txt").write_text("do not lose")
    old = tmp_path / "states" / ("0" * 24)
    old.mkdir()
    collect(llama[0].model, llama[1], windows, tmp_path / "states", memory=MEMORY)
    assert (mine / "notes.txt").read_text() == "do not lose"
    assert not old.exists()


def test_a_run_that_was_stopped_goes_on_where_it_was(
    llama: tuple[Loaded, Anatomy], windows: Windows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded, anatomy = llama
    whole = collect(loaded.model, anatomy, windows, tmp_path / "whole", memory=MEMORY)
    with monkeypatch.context() as patch:
        calls = Calls(patch, fail_at=1)
        with pytest.raises(KeyboardInterrupt):
            collect(loaded.model, anatomy, windows, tmp_path / "states", memory=MEMORY)
    assert calls.count == 1
    assert len(list((tmp_path / "states").rglob("*.safetensors"))) == 1
    with monkeypatch.context() as patch:
        calls = Calls(patch)
        found = collect(loaded.model, anatomy, windows, tmp_path / "states", memory=MEMORY)
    assert calls.count == 2
    assert same(found, whole)


@pytest.mark.parametrize("where", ["replace", "fsync"])
def test_a_full_disk_leaves_no_part_of_a_file(
    where: str, llama: tuple[Loaded, Anatomy], windows: Windows, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, where, full)
    with pytest.raises(FullrankError, match="No space left") as caught:
        collect(llama[0].model, llama[1], windows, tmp_path, memory=MEMORY)
    assert "choose another --out" in str(caught.value)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
