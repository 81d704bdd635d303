"""A series put together: from a file, with the scaling law, and models of one size side by side."""

import math
import subprocess
import sys
from pathlib import Path

import pytest

from fullrank.diagnose.series import series
from fullrank.diagnose.series.scaling import predict
from fullrank.errors import FullrankError
from fullrank.results.series import NOT_TURNED, TURNED

pytestmark = pytest.mark.usefixtures("few_simulations")
FALLING = (40.0, 32.1, 28.0, 25.3, 23.4, 22.0, 20.8, 20.0, 19.2, 18.6, 18.1, 17.6, 17.2, 16.8)
TURNING = (40.0, 32.1, 28.0, 25.9, 24.5, 24.0, 25.4, 27.1, 28.4, 30.1, 31.4, 33.1, 34.4, 36.0)


def file_of(
    tmp_path: Path, curves: dict[str, tuple[float, ...]], *, metric: str = "ppl", shots: str = "0"
) -> Path:
    path = tmp_path / "curves.csv"
    rows = [
        f"{model},{shots},{1000 * (place + 1)},{value},{0.02 * value}"
        for model, values in curves.items()
        for place, value in enumerate(values)
    ]
    path.write_text("\n".join([f"model,shots,step,{metric},{metric}_stderr", *rows]) + "\n")
    return path


def test_one_entry_a_curve(tmp_path: Path) -> None:
    found = series.run([file_of(tmp_path, {"a-70m": TURNING, "a-1b": FALLING})])
    assert [(one.model, one.shots, one.outcome, one.best_step) for one in found.saturation] == [
        ("a-70m", 0, TURNED, 6000),
        ("a-1b", 0, NOT_TURNED, 14_000),
    ]
    assert found.saturation[0].lost_percent == pytest.approx(50)
    assert found.metric == "ppl"
    assert found.controls == ()
    assert found.scaling is None
    assert "--tokens-per-step" in found.scaling_reason


def test_variants_of_one_size_are_put_side_by_side(tmp_path: Path) -> None:
    curves = dict.fromkeys(("p-70m", "p-70m-deduped"), TURNING)
    curves |= dict.fromkeys(("p-70m-0.25MtokBS", "p-1b", "q-70m"), FALLING)
    first, second = series.run([file_of(tmp_path, curves, shots="5")]).controls
    assert "p-70m and p-70m-deduped (5-shot)" in first
    assert "Noise can have made the difference of +0.0 points" in first
    assert "p-70m and p-70m-0.25MtokBS (5-shot)" in second
    assert "p-70m turned after step 6,000 and lost 50.0%" in second
    assert "p-70m-0.25MtokBS did not turn" in second
    assert "width alone does not explain the difference" in second


def test_untested_curves_prove_nothing(tmp_path: Path) -> None:
    (sentence,) = series.run([file_of(tmp_path, {"p-70m": TURNING[:3], "p-70m-seed1": FALLING})]).controls
    assert "could not be tested" in sentence
    assert "Nothing follows" in sentence


def law(parameters: float, tokens: float) -> float:
    return float(predict(parameters, tokens, A=119.09, alpha=0.246, B=410.7, beta=0.28, E=1.69))


def losses(tmp_path: Path, metric: str, change: object = float) -> Path:
    """Losses of the published law over steps of 2**21 tokens, the smallest model 8% above it."""
    sizes = {
        "p-70m": 7e7,
        "p-410m": 4.1e8,
        "p-1b-bf16": 1e9,
        "p-2.8b": 2.8e9,
        "p-6.9b": 6.9e9,
        "p-12b": 1.2e10,
    }
    rows = [
        f"{name},{step},{change(law(size, step * 2**21) * (1.08 if size < 4e8 else 1.0))}"  # type: ignore[operator]
        for name, size in sizes.items()
        for step in (50_000, 100_000, 143_000)
    ]
    path = tmp_path / "curves.csv"
    path.write_text("\n".join([f"model,step,{metric}", *rows]) + "\n")
    return path


def test_scaling_law_of_losses(tmp_path: Path) -> None:
    found = series.run([losses(tmp_path, "val_loss")], tokens_per_step=2**21, web_text=True)
    assert found.scaling_reason == ""
    assert found.scaling.alpha.value == pytest.approx(0.246, rel=1e-3)
    assert found.scaling.points[0].final_gap_percent.value == pytest.approx(8, abs=0.01)
    assert "read from the names" in found.scaling.note
    assert [point.fitted for point in found.scaling.points] == [False, *5 * [True]]


def test_scaling_law_of_perplexities_is_free(tmp_path: Path) -> None:
    found = series.run([losses(tmp_path, "ppl", math.exp)], tokens_per_step=2**21)
    assert found.scaling.fixed == ()
    assert found.scaling.points[-1].final == pytest.approx(law(1.2e10, 143_000 * 2**21))
    assert "E was fitted" in found.scaling.note
    few = series.run([losses(tmp_path, "ppl", math.exp)], tokens_per_step=2**21, fit_from=2e9)
    assert few.scaling is None
    assert "3 models of 3 sizes" in few.scaling_reason


def test_columns_of_parameters_and_tokens_rule(tmp_path: Path) -> None:
    path = tmp_path / "curves.csv"
    rows = [
        f"{name},7,{law(size, 1e11)},{size},1e11"
        for name, size in (("a", 5e8), ("b", 1e9), ("c-1b", 2e9), ("d", 4e9))
    ]
    path.write_text("\n".join(["model,step,loss,parameters,tokens", *rows]) + "\n")
    found = series.run([path], web_text=True)
    assert [point.parameters for point in found.scaling.points] == [5e8, 1e9, 2e9, 4e9]
    assert found.scaling.alpha.value == pytest.approx(0.246, rel=1e-3)
    assert "names" not in found.scaling.note


def test_batch_in_a_name_is_understood(tmp_path: Path) -> None:
    path = tmp_path / "curves.csv"
    runs = (
        ("p-1b", 143_000, 1e9),
        ("p-2b", 143_000, 2e9),
        ("p-410m", 143_000, 4.1e8),
        ("p-410m-0.25MtokBS", 1_144_000, 4.1e8),
    )
    rows = [f"{name},{step},{law(size, 3e11)}" for name, step, size in runs]
    path.write_text("\n".join(["model,step,loss", *rows]) + "\n")
    found = series.run([path], tokens_per_step=2**21, web_text=True)
    assert {point.tokens for point in found.scaling.points} == {143_000 * 2**21}
    assert "p-410m-0.25MtokBS" in found.scaling.note


def test_the_floor_of_web_text_is_for_those_who_ask(tmp_path: Path) -> None:
    found = series.run([losses(tmp_path, "val_loss")], tokens_per_step=2**21)
    assert found.scaling.fixed == ()
    assert found.scaling.E.value != 1.69
    with pytest.raises(FullrankError, match="leave out --web-text"):
        series.run([losses(tmp_path, "ppl")], tokens_per_step=2**21, web_text=True)


def test_accuracies_have_no_law(tmp_path: Path) -> None:
    found = series.run(
        [file_of(tmp_path, {"a-1b": (0.2, 0.3, 0.4, 0.5)}, metric="sciq_acc")], tokens_per_step=1
    )
    assert found.scaling is None
    assert "sciq_acc is none" in found.scaling_reason


def test_unknown_direction_is_assumed_and_said(tmp_path: Path) -> None:
    path = file_of(tmp_path, {"a": TURNING}, metric="gap")
    with pytest.raises(FullrankError, match="choose with --metric"):
        series.run([path])
    found = series.run([path], metric="gap")
    assert found.saturation[0].turned
    assert any("lower gap was taken to be better" in note for note in found.notes)


def test_a_file_needs_no_torch(tmp_path: Path) -> None:
    path = file_of(tmp_path, {"a-70m": TURNING})
    code = (
        "import sys\nfrom fullrank.diagnose.series import series\n"
        f"series.run([{str(path)!r}])\nassert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("sources", "settings", "message"),
    [
        ([], {}, "nothing to read"),
        (["curves.csv", "."], {}, "stands alone"),
        (["curves.csv", "curves.csv"], {}, "stands alone"),
        (["curves.csv"], {"revisions": ("step1",)}, "are for checkpoints"),
        (["curves.csv"], {"text": (Path("curves.csv"),)}, "are for checkpoints"),
        (["curves.csv"], {"metric": "los"}, "one of ppl"),
        (["curves.csv"], {"tokens_per_step": 0}, "positive"),
        (["curves.csv"], {"fit_from": -1}, "positive"),
        (["weights.bin"], {}, "is a file"),
        (["./none"], {}, "no checkpoint directory"),
        (["a/b", "c/d"], {"revisions": ("step1",)}, "pass one model"),
        (["none.csv"], {}, "no file at"),
    ],
)
def test_refusals(
    sources: list[str], settings: dict[str, object], message: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    file_of(tmp_path, {"a": FALLING})
    (tmp_path / "weights.bin").write_bytes(b"\0\1")
    monkeypatch.chdir(tmp_path)
    paths = [source if "/" in source else Path(source) for source in sources]
    with pytest.raises(FullrankError, match=message):
        series.run(paths, **settings)  # type: ignore[arg-type]
