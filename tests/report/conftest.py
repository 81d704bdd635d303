from __future__ import annotations

import dataclasses
import json
import math
import shutil
import subprocess
from collections.abc import Callable
from html import escape, unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from fullrank.results import QUESTIONS, Diagnosis, Estimate, Ladder, LadderRung, Provenance
from fullrank.results import diagnosis as parts

PAYLOAD = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"' {{ 7 * 7 }}"


def rung(
    head: str, width: int, *, kl: float, floor: float, least_rank: int, components: int = 1
) -> LadderRung:
    return LadderRung(
        head=head,
        width=width,
        components=components,
        parameters=1000 * width + components,
        least_rank=least_rank,
        kl=kl,
        floor=floor,
        seconds=11.25,
    )


@pytest.fixture(scope="session")
def made() -> Provenance:
    return Provenance(
        command="fullrank demo --out runs/demo",
        commit="3f9c1e0a7d2b4c5e6f708192a3b4c5d6e7f80912",
        time="2026-03-05T14:02:11+00:00",
        device="cpu, 2 threads",
        seed=17,
        versions={"python": "3.12.3", "torch": "2.13.0"},
    )


@pytest.fixture(scope="session")
def ladder() -> Ladder:
    return Ladder(
        contexts=512,
        vocabulary=256,
        least_rank=24,
        small_width=8,
        steps=4000,
        entropy=3.41273,
        rungs=(
            rung("mos", 8, components=8, kl=0.06231, floor=0.40871, least_rank=255),
            rung("softmax", 24, kl=0.0007123, floor=3.1e-13, least_rank=24),
            rung("softmax", 8, kl=0.42137, floor=0.40871, least_rank=8),
            rung("softmax", 16, kl=0.11874, floor=0.11021, least_rank=16),
            rung("sigsoftmax", 8, kl=0.30111, floor=0.40871, least_rank=117),
        ),
    )


@pytest.fixture(scope="session")
def odd() -> Ladder:
    """Everything that a record may hold and no one expects."""
    return Ladder(
        contexts=3,
        vocabulary=5,
        least_rank=4,
        small_width=2,
        steps=1,
        entropy=math.nan,
        rungs=(
            rung("softmax", 2, kl=math.inf, floor=0.0, least_rank=2),
            rung("softmax", 2, kl=0.3, floor=0.2, least_rank=2),
            rung("softmax", 4, kl=0.0, floor=math.nan, least_rank=4),
            rung(PAYLOAD, 2, kl=math.nan, floor=0.21, least_rank=3),
            rung("a_name_of_many_words_" * 9, 2, kl=-1e-12, floor=0.21, least_rank=3, components=12345),
            rung("nul \x00, half a pair \ud800, two\nlines", 2, kl=1e-9, floor=math.nan, least_rank=0),
        ),
    )


@pytest.fixture(scope="session")
def payload() -> str:
    return PAYLOAD


def around(value: float, half: float) -> Estimate:
    return Estimate(value=value, low=value - half, high=value + half)


def geometry(layer: int, last: int) -> parts.LayerGeometry:
    depth = layer / last
    return parts.LayerGeometry(
        layer=layer,
        name="embedding" if layer == 0 else "final norm" if layer == last else f"block {layer}",
        cosine=around(0.12 + 0.55 * math.sin(3.0 * depth), 0.015),
        cosine_centred=around(0.004 + 0.02 * depth, 0.004),
        top_variance_share=0.11 + 0.4 * depth * (1 - depth),
        effective_rank=310.5 - 150 * depth * (1 - depth),
        outliers=(parts.OutlierDimension(dimension=139, variance_share=0.21, kurtosis=14.2),)
        if layer % 4 == 2
        else (),
        largest_kurtosis=14.2,
        sinks=517,
    )


def fit(head: str, gain: Estimate, *, components: int = 1, equal: Estimate | None = None) -> parts.HeadFit:
    return parts.HeadFit(
        head=head,
        components=components,
        parameters=28_311_552 + 331_776 * components,
        loss=around(3.2411 - gain.value, 0.041),
        gain=gain,
        gain_over_equal=equal or around(gain.value - 0.0031, 0.005),
        gain_by_seed=(gain.value - 0.0004, gain.value + 0.0003, gain.value + 0.0001),
        learning_rate=0.001,
        steps=600,
    )


def smol() -> Diagnosis:
    """What a diagnosis of SmolLM2-135M may look like."""
    width, vocabulary, layers = 576, 49152, 30
    ranks = (8, 16, 32, 64, 128, 192, 256, 384, 512, 576)
    loss = {rank: 3.236 + 0.9 * (rank / 40 + 1) ** -1.6 + 2.1 * math.exp(-rank / 14) for rank in ranks}
    singular_values = tuple(
        96.0 if place == 0 else 24.0 * (1 - place / 640) ** 0.7 * (place + 1) ** -0.12
        for place in range(width)
    )
    return Diagnosis(
        model=parts.ModelFacts(
            name="SmolLM2-135M",
            source="directory",
            architecture="LlamaForCausalLM",
            parameters=134_515_008,
            layers=layers,
            width=width,
            vocabulary=vocabulary,
            tokens=vocabulary - 3,
            tied=True,
            bias=False,
            logit_scale=1.0,
            softcap=None,
            final_norm="LlamaRMSNorm",
            storage="bfloat16",
            dtype="float32",
            fingerprint="9b1c62d0f4a8e753",
            notes=("The output matrix is the input embedding (tied).", "3 rows of padding are left out."),
        ),
        text=parts.TextFacts(
            sources=("wikitext-2/test.txt",),
            sha256="173c87a53759e0201f33e0ccf978e510c2042d7f2cb78229d9a50d79b9e7dd08",
            bytes=1_256_449,
            tokens=286_720,
            window=1024,
            windows=280,
            starts_with_bos=False,
            fit_tokens=172_032,
            choose_tokens=28_672,
            held_out_tokens=86_016,
        ),
        findings=(
            parts.Finding(
                code="unreachable_tokens",
                question="unreachable",
                sentence="4 tokens can never be the most probable, whatever the context.",
            ),
            parts.Finding(
                code="outlier_dimension",
                question="anisotropy",
                sentence="Dimension 139 holds 21% of the variance of the states of 7 layers.",
            ),
        ),
        loss=parts.Loss(
            nats_per_token=around(3.2404, 0.037),
            standard_error=0.0189,
            perplexity=Estimate(value=25.54, low=24.62, high=26.5),
            bits_per_byte=around(1.0669, 0.0122),
            tokens=286_720,
            bytes=1_256_449,
            blocks=280,
            by_position=tuple(
                parts.PositionLoss(
                    first=2**power - 1,
                    last=2 ** (power + 1) - 2,
                    nats=around(3.05 + 4.4 * 0.62**power, 0.5 * 0.8**power),
                )
                for power in range(10)
            ),
        ),
        spectrum=parts.Spectrum(
            singular_values=singular_values,
            singular_entropy=0.1276,
            effective_rank=507.2,
            random_effective_rank=573.9,
            stable_rank=9.41,
            participation_ratio=48.3,
            condition=39.6,
            numerical_rank=width,
            noise=0.1312,
            noise_origin="rounding to bfloat16, entry by entry",
        ),
        anisotropy=parts.Anisotropy(
            tokens=20_480, layers=tuple(geometry(layer, layers) for layer in range(layers + 1))
        ),
        logprob_rank=parts.LogprobRank(
            least_rank=width,
            gap_rank=width,
            gap=51_200.0,
            noise_floor=0.0021,
            ceiling=width,
            ceiling_reason="the width: RMSNorm keeps it, and there is no bias",
            contexts=2048,
            columns=vocabulary,
            method="core",
            singular_values=(*(value * 640 for value in singular_values), 6.1e-4, 5.9e-4, 5.2e-4),
        ),
        rank_needed=parts.RankNeeded(
            points=tuple(
                parts.RankPoint(
                    rank=rank,
                    truncated=around(loss[rank] + 2.5 * (1 - rank / width) ** 2 + 0.006, 0.041),
                    refitted=around(loss[rank], 0.04),
                    learning_rate=0.002,
                )
                for rank in ranks
            ),
            original=around(3.2583, 0.041),
            tolerance=0.01,
            knee=Estimate(value=301.4, low=250.2, high=379.8),
            truncated_knee=Estimate(value=541.0, low=533.0, high=548.5),
            still_falling=False,
            slope=Estimate(value=0.0105, low=0.0081, high=0.0126),
        ),
        better_head=parts.BetterHead(
            original=around(3.2583, 0.041),
            fits=(
                fit("softmax", Estimate(value=0.0, low=0.0, high=0.0)),
                fit("softmax_equal", Estimate(value=0.0031, low=-0.0012, high=0.0074)),
                fit("mos", Estimate(value=0.0154, low=0.0078, high=0.0231), components=4),
                fit("sigsoftmax", Estimate(value=0.0012, low=-0.0015, high=0.0042)),
                fit("moss", Estimate(value=0.0171, low=0.0089, high=0.0252), components=4),
                fit("plif", Estimate(value=-0.0008, low=-0.0031, high=0.0016)),
                fit("trunk", Estimate(value=0.0119, low=0.0052, high=0.0185), components=4),
            ),
            best="moss",
            best_gain=Estimate(value=0.0140, low=0.0061, high=0.0218),
            seeds=3,
            fit_tokens=172_032,
            held_out_tokens=86_016,
            trained_rows=17_411,
        ),
        unreachable=parts.Unreachable(
            vocabulary=vocabulary - 3,
            argmaxable=49_139,
            never=tuple(
                parts.UnreachableToken(id=identity, text=text, depth=depth)
                for identity, text, depth in (
                    (0, "<|endoftext|>", 0.41),
                    (4271, " SolidGoldMagikarp", 0.12),
                    (31_007, "\u3000\u3000", 0.033),
                    (48_801, " \u0645\u0631\u062d\u0628\u0627", 0.0081),
                )
            ),
            duplicates=1,
            undecided=6,
            padding_never=3,
            capacity=112,
            capacity_interval=(108, 117),
            capacity_samples=64,
            seconds=418.2,
        ),
        gradient=parts.Gradient(
            kept_norm=around(0.1871, 0.0044),
            kept_energy=around(0.0462, 0.0021),
            null_norm=0.1083,
            null_energy=0.01172,
            tokens=8192,
            quantiles=(0.061, 0.118, 0.164, 0.231, 0.402),
        ),
        missing=(),
        seconds={name: 12.5 * (place + 1) for place, name in enumerate(QUESTIONS)},
    )


@pytest.fixture(scope="session")
def diagnosis() -> Diagnosis:
    return smol()


@pytest.fixture(scope="session")
def partial() -> Diagnosis:
    """Half of the questions have no answer, and one of them no reason."""
    none = ("spectrum", "rank_needed", "better_head", "gradient")
    return dataclasses.replace(
        smol(),
        findings=(),
        **dict.fromkeys(none),
        missing=(
            parts.Missing(question="rank_needed", reason="interrupted after 3 of 9 ranks."),
            parts.Missing(question="better_head", reason="too few tokens: 900, needs 20,000."),
            parts.Missing(question="gradient", reason="not asked."),
        ),
    )


@pytest.fixture(scope="session")
def other() -> Diagnosis:
    """Another model on the same text: wider, still falling, and without a gain."""
    one = smol()
    assert one.loss is not None
    assert one.rank_needed is not None
    assert one.better_head is not None
    assert one.gradient is not None
    points = tuple(
        dataclasses.replace(
            point,
            rank=round(point.rank * 4 / 3),
            truncated=around(point.truncated.value + 0.11, 0.04),
            refitted=None if point.refitted is None else around(point.refitted.value + 0.1, 0.04),
        )
        for point in one.rank_needed.points
    )
    return dataclasses.replace(
        one,
        model=dataclasses.replace(
            one.model, name="Pythia-160M", width=768, vocabulary=50304, tokens=50277, layers=12, tied=False
        ),
        findings=(),
        loss=dataclasses.replace(
            one.loss,
            by_position=tuple(
                dataclasses.replace(part, nats=around(part.nats.value + 0.2, 0.1))
                for part in one.loss.by_position
            ),
        ),
        anisotropy=parts.Anisotropy(
            tokens=20_480,
            layers=tuple(
                dataclasses.replace(geometry(layer, 12), cosine=around(0.3 + 0.05 * layer, 0.02))
                for layer in range(13)
            ),
        ),
        rank_needed=dataclasses.replace(
            one.rank_needed,
            points=points,
            original=around(3.361, 0.04),
            knee=Estimate(value=740.0, low=620.0, high=768.0),
            still_falling=True,
        ),
        better_head=dataclasses.replace(
            one.better_head,
            fits=tuple(
                dataclasses.replace(
                    part, gain=Estimate(value=part.gain.value / 4, low=-0.002, high=part.gain.high / 2)
                )
                for part in one.better_head.fits
            ),
            best="mos",
            best_gain=Estimate(value=0.0021, low=-0.0019, high=0.0058),
        ),
        gradient=dataclasses.replace(one.gradient, quantiles=(0.08, 0.15, 0.2, 0.26, 0.45), null_norm=0.1236),
    )


HOSTILE = f"{PAYLOAD}\u202egnp.exe\u2066\x00\x1b[31m\ud800\u200b\u2028" + "x\u0301\u0301\u0301\u0301" * 3


@pytest.fixture(scope="session")
def hostile_text() -> str:
    return HOSTILE


@pytest.fixture(scope="session")
def odd_diagnosis() -> Diagnosis:
    """No number is a number, and every text wants to be something else."""
    return with_every(smol(), math.nan)


def with_every(record: Diagnosis, number: float) -> Diagnosis:
    """The record with every float replaced by the number, every text by a hostile one."""

    def replaced(value: object) -> object:
        if isinstance(value, bool | int | None):
            return value
        if isinstance(value, float):
            return number
        if isinstance(value, str):
            return HOSTILE + "y" * 10_000
        if isinstance(value, tuple):
            return tuple(replaced(item) for item in value)
        if isinstance(value, dict):
            return {replaced(key): replaced(item) for key, item in value.items()}
        changed = {
            field.name: replaced(getattr(value, field.name))
            for field in dataclasses.fields(value)  # type: ignore[arg-type]
        }
        return dataclasses.replace(value, **changed)  # type: ignore[type-var]

    return replaced(record)  # type: ignore[return-value]


def emptied(record: Diagnosis) -> Diagnosis:
    """The record with every tuple and dictionary empty and every count 0."""

    def replaced(value: object) -> object:
        if isinstance(value, tuple):
            return ()
        if isinstance(value, dict):
            return {}
        if dataclasses.is_dataclass(value):
            changed = {
                field.name: replaced(getattr(value, field.name)) for field in dataclasses.fields(value)
            }
            return dataclasses.replace(value, **changed)  # type: ignore[type-var]
        return 0 if type(value) is int else value

    return replaced(record)  # type: ignore[return-value]


@pytest.fixture(scope="session", params=["nan", "inf", "-inf", "zero", "huge", "negative", "empty"])
def strange(request: pytest.FixtureRequest) -> Diagnosis:
    """Records that a broken measurement could leave behind."""
    if request.param == "empty":
        return emptied(smol())
    numbers = {"zero": 0.0, "huge": 1e308, "negative": -1.0}
    return with_every(
        smol(), numbers.get(request.param, float("nan")) if request.param in numbers else float(request.param)
    )


VOID = {"meta", "link", "img", "br", "hr", "input"}


class Reader(HTMLParser):
    """Elements, attributes and text of a page; fails where an end tag has no beginning."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.cells: list[str] = []
        self.open: list[str] = []
        self.text: dict[str, str] = {}
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag in ("td", "th"):
            self.cells.append("")
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if {"td", "th"} & set(self.open):
            self.cells[-1] += data
        for tag in set(self.open):
            self.text[tag] = self.text.get(tag, "") + data


@pytest.fixture
def blank_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests that look at the words of a page: its pictures take a second and more."""
    blank = '<svg xmlns="http://www.w3.org/2000/svg" width="1" height="1" viewBox="0 0 1 1"></svg>'
    monkeypatch.setattr("vl_convert.vegalite_to_svg", lambda *of, **options: blank)


@pytest.fixture(scope="session")
def read_page() -> Callable[[str], Reader]:
    return Reader


# What no reading of the source can tell: whether anything runs out of its picture or of the window, or over
# its neighbour. The copy that is measured has a script, so it cannot have the policy.
MEASURE = """<script>
const boxes = (picture, what) => [...picture.querySelectorAll(what)]
  .filter(mark => mark.getAttribute("opacity") !== "0")
  .map(mark => ({box: mark.getBoundingClientRect(), text: mark.outerHTML}))
  .filter(({box}) => box.width > 0 && box.height > 0);
const pictures = [...document.querySelectorAll("svg[role=img]")]
  .filter(svg => svg.getBoundingClientRect().width > 0);
const outside = [], overlapping = [];
for (const picture of pictures) {
  const frame = picture.getBoundingClientRect();
  for (const {box, text} of boxes(picture, "text, path, line"))
    if (box.left < frame.left - 1 || box.right > frame.right + 1) outside.push(text);
  const texts = boxes(picture, "text");
  for (const [place, one] of texts.entries())
    for (const other of texts.slice(place + 1)) {
      const across = Math.min(one.box.right, other.box.right) - Math.max(one.box.left, other.box.left);
      const along = Math.min(one.box.bottom, other.box.bottom) - Math.max(one.box.top, other.box.top);
      if (across > 0 && along > 3) overlapping.push(one.text + other.text);
    }
}
const result = document.createElement("output");
result.textContent = JSON.stringify({
  pictures: pictures.length, outside, overlapping,
  overflow: document.documentElement.scrollWidth - document.documentElement.clientWidth,
  width: innerWidth,
  foreign: document.scripts.length - 1 + document.images.length + document.links.length,
  requests: performance.getEntriesByType("resource").length,
});
parent.document.body.append(result);
</script></body>"""


@pytest.fixture
def browse(tmp_path: Path) -> Callable[..., str]:
    """What chromium prints after it has opened a page."""
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("chromium is not installed")

    def run(page: str, *options: str) -> str:
        path = tmp_path / "page.html"
        path.write_text(page, encoding="utf8")
        command = [
            chromium,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-quic",
            "--no-first-run",
            "--disable-background-networking",
            "--disable-component-update",
            "--disable-sync",
            "--hide-scrollbars",
            "--enable-logging=stderr",
            f"--user-data-dir={tmp_path / 'profile'}",
            *options,
            path.as_uri(),
        ]
        done = subprocess.run(
            command, capture_output=True, text=True, encoding="utf8", timeout=120, check=True
        )
        # What a page has to say to its console is an error or a breach of its policy.
        assert "CONSOLE" not in done.stderr, done.stderr
        return done.stdout

    return run


@pytest.fixture
def measure(browse: Callable[..., str]) -> Callable[..., list[Any]]:
    """What runs out of its picture or of windows of some widths, and how many pictures there are."""

    def run(page: str, *widths: int) -> list[Any]:
        measured = escape(page.replace("Content-Security-Policy", "").replace("</body>", MEASURE))
        # In frames, because a window of chromium is never narrower than 500 pixels, and takes a second.
        frames = "".join(
            f'<iframe srcdoc="{measured}" width="{width}" height="1600" frameborder="0"></iframe>'
            for width in widths
        )
        document = browse(f"<!doctype html><body>{frames}</body>", "--dump-dom", "--window-size=1400,1700")
        told = [unescape(part.split("</output>")[0]) for part in document.split("<output>")[1:]]
        found = {one["width"]: one for one in map(json.loads, told)}
        assert len(told) == len(found) == len(widths)
        return [found[width] for width in widths]

    return run
