"""Reading curves from CSV: what is understood, what is left out and counted, what is refused."""

from pathlib import Path

import pytest

from fullrank.diagnose.series import curves
from fullrank.errors import FullrankError

PLAIN = """model,shots,step,lambada_ppl,lambada_ppl_stderr,lambada_acc
a-70m,0,2000,50.0,2.0,0.3
a-70m,0,1000,100.0,4.0,0.2
a-70m,5,1000,200.0,8.0,0.1
b-1b,0,1000,10.0,0.5,0.6
"""


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "curves.csv"
    path.write_text(text)
    return path


def test_curves_by_metric_model_and_shots(tmp_path: Path) -> None:
    table = curves.read(written(tmp_path, PLAIN))
    assert table.metrics == ("lambada_ppl", "lambada_acc")
    assert [(one.metric, one.model, one.shots) for one in table.curves] == [
        (metric, model, shots)
        for metric in table.metrics
        for model, shots in (("a-70m", 0), ("a-70m", 5), ("b-1b", 0))
    ]
    first = table.curves[0]
    assert (first.steps, first.values, first.standard_errors) == ((1000, 2000), (100.0, 50.0), (4.0, 2.0))
    assert first.lower_is_better is True
    assert first.unit == "perplexity"
    assert table.curves[3].lower_is_better is False
    assert table.curves[3].standard_errors is None
    assert table.notes == ()


def test_odd_values_are_left_out_and_counted(tmp_path: Path) -> None:
    rows = "\n".join(
        f"m,{step},{value}" for step, value in enumerate(("nan", "inf", "-1", "0", "n/a", "3", "2", "1"))
    )
    table = curves.read(written(tmp_path, f"model,step,loss\n{rows}\n"))
    (one,) = table.curves
    assert one.steps == (5, 6, 7)
    assert one.dropped == 5
    assert one.shots is None
    assert any("5 values of loss" in note for note in table.notes)


def test_repeated_steps_are_averaged_and_said(tmp_path: Path) -> None:
    table = curves.read(written(tmp_path, "model,step,loss,loss_se\nm,10,2,0.1\nm,10,4,0.3\nm,5,9,0.2\n"))
    (one,) = table.curves
    assert one.steps == (5, 10)
    assert one.values == (9.0, 3.0)
    assert one.standard_errors == pytest.approx((0.2, 0.2))
    assert any("1 rows repeat" in note for note in table.notes)


def test_missing_errors_take_the_usual_one() -> None:
    points = [(1, 2.0, 0.1), (2, 2.0, None), (3, 2.0, 0.0), (4, 2.0, 0.3), (5, 2.0, 0.0001)]
    one = curves.curve(model="m", shots=None, metric="loss", points=points)
    assert one.standard_errors == pytest.approx((0.1, 0.1, 0.1, 0.3, 0.01))


def test_facts_of_models_and_steps(tmp_path: Path) -> None:
    table = curves.read(
        written(tmp_path, "model,step,loss,parameters,tokens\nm,1,3,7e7,100\nm,2,2,7e7,200\nn,1,3,,\n")
    )
    assert table.parameters == {"m": 7e7}
    assert table.tokens == {("m", 1): 100, ("m", 2): 200}
    assert table.metrics == ("loss",)


def test_text_columns_are_left_out_and_named(tmp_path: Path) -> None:
    table = curves.read(written(tmp_path, "\ufeffModel, Step ,loss,remark\nm,1e3,3,good\n\nm,2000,2,\n"))
    assert table.curves[0].steps == (1000, 2000)
    assert any("remark" in note for note in table.notes)


@pytest.mark.parametrize(
    ("metric", "better", "unit"),
    [
        ("lambada_ppl", True, "perplexity"),
        ("val_loss", True, "nats"),
        ("nats_per_token", True, "nats per token"),
        ("pile_bpb", True, "bits per byte"),
        ("sciq_acc", False, "share"),
        ("squad_f1", False, ""),
        ("gradient_norm", None, ""),
    ],
)
def test_direction_and_unit_by_name(metric: str, better: bool | None, unit: str) -> None:
    assert curves.lower_is_better(metric) is better
    assert curves.unit(metric) == unit


def test_primary_metric() -> None:
    there = ("gradient_norm", "sciq_acc", "val_loss", "ppl")
    assert curves.primary(there, None) == "val_loss"
    assert curves.primary(there, "ppl") == "ppl"
    assert curves.primary(("gradient_norm", "sciq_acc"), None) == "sciq_acc"
    with pytest.raises(FullrankError, match="val_loss"):
        curves.primary(there, "vall_oss")
    with pytest.raises(FullrankError, match="choose with --metric"):
        curves.primary(("gradient_norm",), None)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["no column model", "nothing"]),
        ("a,b\n1,2\n", ["no column model", "a, b"]),
        ("model,loss\nm,1\n", ["no column step"]),
        ("model,step,loss\n", ["no rows"]),
        ("model,step\nm,1\n", ["no column of numbers"]),
        ("model,step,loss_stderr\nm,1,0.1\n", ["no column of numbers"]),
        ("model,step,remark\nm,1,good\n", ["no column of numbers", "remark"]),
        ("model,step,loss\nm,first,1\n", ["line 2", "step 'first'"]),
        ("model,step,loss\nm,1,1\nm,1.5,1\n", ["line 3", "1.5"]),
        ("model,step,loss\nm,-1,1\n", ["line 2", "-1"]),
        ("model,shots,step,loss\nm,few,1,1\n", ["shots 'few'"]),
        ("model,step,loss\n,1,1\n", ["line 2", "no model"]),
        ("model,step,loss\nm,1\n", ["line 2", "2 cells, expected 3"]),
        ("model,step,loss,loss\nm,1,1,1\n", ["twice"]),
        ("model,step,loss\nm,1,\0\n", ["not text"]),
    ],
)
def test_refusals(text: str, words: list[str], tmp_path: Path) -> None:
    with pytest.raises(FullrankError) as raised:
        curves.read(written(tmp_path, text))
    assert all(word in str(raised.value) for word in words)
    assert "\n" not in str(raised.value)


def test_files_that_are_missing_or_binary_are_refused(tmp_path: Path) -> None:
    (tmp_path / "binary.csv").write_bytes(bytes(range(128, 256)))
    for name, message in (("none.csv", "no file at"), ("binary.csv", "not text")):
        with pytest.raises(FullrankError, match=message):
            curves.read(tmp_path / name)
