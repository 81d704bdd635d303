"""The configuration round trip, what it asks the body, and how the Auto classes come to know it."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

from fullrank.errors import FullrankError
from fullrank.models import FullrankConfig

BODY = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 101}


def config(**changes: Any) -> FullrankConfig:
    body = LlamaConfig(**BODY, max_position_embeddings=77, eos_token_id=5)
    head = {"name": "doc", "hidden": 32, "layers": [[32, 2], [32, 1]]}
    return FullrankConfig(**{"body": body, "head": head, "tie_word_embeddings": True, **changes})


def test_round_trip(tmp_path: Path) -> None:
    first = config(softcap=30.0, logit_scale=0.25, origin={"name": "x", "kl": 1e-9})
    first.save_pretrained(tmp_path)
    again = FullrankConfig.from_pretrained(tmp_path)
    assert isinstance(again.body, LlamaConfig)
    assert again.to_dict() == first.to_dict()
    assert copy.deepcopy(again).to_dict() == first.to_dict()


def test_the_body_answers_and_is_stored_once(tmp_path: Path) -> None:
    made = config()
    assert made.max_position_embeddings == 77
    assert made.eos_token_id == 5
    assert made.vocab_size == 101
    assert made.get_text_config(decoder=True) is made.body
    made.save_pretrained(tmp_path)
    stored = json.loads((tmp_path / "config.json").read_text())
    assert stored["model_type"] == "fullrank"
    assert not {"hidden_size", "rope_parameters", "max_position_embeddings"} & set(stored)
    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = made.no_such_thing


def test_no_place_on_a_machine_is_stored(tmp_path: Path) -> None:
    made = config()
    made.body.name_or_path = made.name_or_path = "/home/somebody/secret"
    made.save_pretrained(tmp_path)
    assert "secret" not in (tmp_path / "config.json").read_text()


def test_attention_is_chosen_for_the_body() -> None:
    assert config(attn_implementation="eager").body._attn_implementation == "eager"


def test_unknown_body() -> None:
    with pytest.raises(FullrankError, match="no_such_family"):
        FullrankConfig(body={"model_type": "no_such_family"})


BEFORE = """
import sys
import fullrank
assert "torch" not in sys.modules and "transformers" not in sys.modules
from transformers import AutoConfig, AutoModelForCausalLM
"""
AFTER = """
from transformers import AutoConfig, AutoModelForCausalLM
import fullrank
"""


@pytest.mark.slow(reason="seven seconds of imports each; tests/models loads saved models in this process")
@pytest.mark.parametrize("order", [BEFORE, AFTER], ids=["fullrank first", "last"])
def test_auto_classes_know_the_model_in_a_process_that_only_imported_fullrank(
    order: str, tmp_path: Path, tiny_model: Callable[..., Any]
) -> None:
    from fullrank.upgrade import upgrade

    upgrade(tiny_model(), "mos", components=2).save_pretrained(tmp_path)
    script = f"""{order}
config = AutoConfig.from_pretrained({str(tmp_path)!r})
model = AutoModelForCausalLM.from_pretrained({str(tmp_path)!r})
print(type(config).__name__, type(model).__name__, model.lm_head.components)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["FullrankConfig", "FullrankForCausalLM", "2"]


def test_no_code_is_stored_but_an_import_and_that_is_not_run_here(tmp_path: Path) -> None:
    from transformers import AutoConfig

    # What transformers calls on a class that it found by an import file.
    FullrankConfig.register_for_auto_class()
    config().save_pretrained(tmp_path)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["config.json", "fullrank_import.py"]
    assert "from fullrank.models import FullrankConfig" in (tmp_path / "fullrank_import.py").read_text()
    (tmp_path / "fullrank_import.py").write_text("raise SystemExit('run')")
    for trust in (None, False, True):
        assert type(AutoConfig.from_pretrained(tmp_path, trust_remote_code=trust)) is FullrankConfig


@pytest.mark.slow(reason="seven seconds of imports")
def test_a_process_that_never_heard_of_fullrank_finds_it_where_it_may(
    tmp_path: Path, tiny_model: Callable[..., Any]
) -> None:
    from fullrank.upgrade import upgrade

    upgrade(tiny_model(), "mos", components=2).save_pretrained(tmp_path / "made")
    script = f"""
from transformers import AutoModelForCausalLM
try:
    AutoModelForCausalLM.from_pretrained({str(tmp_path / "made")!r}, trust_remote_code=False)
except ValueError as error:
    assert "trust_remote_code=True" in str(error)
model = AutoModelForCausalLM.from_pretrained({str(tmp_path / "made")!r}, trust_remote_code=True)
model.save_pretrained({str(tmp_path / "again")!r})
print(type(model).__module__)
"""
    environment = {**os.environ, "HF_HOME": str(tmp_path / "cache")}
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["fullrank.models.causal_lm"]
    # What it saves is found in the same way, and holds no copy of the code either.
    made, again = ({file.name for file in (tmp_path / name).iterdir()} for name in ("made", "again"))
    assert made == again
    stored = json.loads((tmp_path / "again" / "config.json").read_text())
    assert stored["auto_map"] == {"AutoConfig": "fullrank_import.FullrankConfig"}


def test_functions_keep_their_names_beside_the_files_that_hold_them() -> None:
    import importlib

    import fullrank.upgrade

    for name in ("upgrade", "collapse"):
        module = importlib.import_module(f"fullrank.upgrade.{name}")
        assert getattr(fullrank.upgrade, name) is getattr(module, name)
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = fullrank.upgrade.no_such_name
