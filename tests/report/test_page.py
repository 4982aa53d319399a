"""The page is complete, self-contained and true to the numbers of any evaluation."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from base64 import b64decode
from dataclasses import replace
from html import unescape
from html.parser import HTMLParser
from xml.etree import ElementTree

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text

from caster import CasterError
from caster.config import Settings
from caster.core.verdict import REASONS, Verdict
from caster.report import evaluation_page as page
from caster.report.evaluation import write_page
from caster.report.evaluation_results import Batch, ClassScore, Evaluation, Score
from caster.report.figures import CertificateAxis
from caster.report.intervals import Interval
from caster.report.mechanism import aligned_layers
from caster.report.metrics import Bin
from caster_bench.methods.registry import find
from tests.support.sampling import sampled

VOID = {"meta", "br", "img", "link", "hr", "input"}
REJECTIONS = [reason for reason in REASONS if reason != "accepted"]


class Structure(HTMLParser):
    """Fail on an element that is closed twice, never, or in the wrong place."""

    def __init__(self):
        super().__init__()
        self.open, self.text = [], []

    def handle_starttag(self, tag, attrs):
        assert len(dict(attrs)) == len(attrs), attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        assert "svg" in self.open, f"<{tag}/> is closed in SVG only"

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] != "style":
            self.text.append(data)


def read(html):
    """The page's text, after a check of its structure."""
    parser = Structure()
    parser.feed(html)
    parser.close()
    assert parser.open == []
    return " ".join("".join(parser.text).split())


def made(
    n_batches=12, n_classes=5, accepted=0.6, ratio=None, head=True, size=32, labels=None, nll=0.5
):
    """An evaluation of any shape, its numbers drawn at random but in keeping with each other."""
    rng = np.random.default_rng(0)
    names = ["frozen", "source_gda", "ungated", "gated"][0 if head else 1 :]
    batches = []
    for _ in range(n_batches):
        yes = rng.random() < accepted
        r = ratio if ratio is not None else float(rng.lognormal(-0.8 if yes else 0.6, 0.3))
        reason = "accepted" if yes else REJECTIONS[rng.integers(len(REJECTIONS))]
        right = {name: int(rng.integers(size + 1)) for name in names}
        right["gated"] = right["ungated" if yes else names[0]]
        batches.append(Batch(size, min(size, n_classes), right, Verdict(yes, reason, r, 9, 3)))
    bins = (Bin(0.3, 0.5, 20), Bin(0.97, 0.9, 60))
    scores = {}
    for name in names:
        accuracy = sum(b.right[name] for b in batches) / (size * n_batches)
        interval = Interval(accuracy - 0.01, accuracy + 0.02) if n_batches > 1 else None
        scores[name] = Score(accuracy, interval, 0.013, 0.027, nll, 0.0814, bins)
    labels = labels or [f"class {c}" for c in range(n_classes)]
    each = max(1, size * n_batches // n_classes)
    right = (
        rng.integers(each + 1, size=(n_classes, 2)) if accepted else np.ones((n_classes, 2), int)
    )
    classes = tuple(
        ClassScore(label, each, *pair) for label, pair in zip(labels, right.tolist(), strict=True)
    )
    gain = Interval(0.004, 0.034) if n_batches > 1 else None
    settings = Settings(tau=0.7)
    return Evaluation(
        "target.npz", settings, {"state": "c0ffee"}, scores, gain, tuple(batches), classes
    )


SHAPES = {
    "plain": {},
    "one batch": {"n_batches": 1},
    "two batches": {"n_batches": 2},
    "two thousand batches": {"n_batches": 2000},
    "two classes": {"n_classes": 2},
    "a thousand classes": {"n_classes": 1000},
    "no head": {"head": False},
    "all rejected": {"accepted": 0.0},
    "all accepted": {"accepted": 1.0},
    "no certificate": {"accepted": 0.0, "ratio": math.inf},
    "certificates of nothing": {"ratio": 0.0},
    "coinciding classes": {"accepted": 0.0, "ratio": 3e11},
    "batches of one": {"size": 1, "accepted": 0.0, "ratio": math.inf},
    "impossible answers": {"nll": math.inf},
    "any script": {"n_classes": 3, "labels": ["$x^$ <script>&", "狼 🐺", "_{"]},
}


@pytest.fixture(scope="module", params=sampled(SHAPES, 4))
def shown(request):
    found = made(**SHAPES[request.param])
    return found, page.render(found)


def test_the_page_is_well_formed_and_loads_nothing(shown):
    _, html = shown
    text = read(html)
    assert not re.search(r"{[{%]|[%}]}", text)  # no placeholder left over
    loads = re.findall(r"""(?:src|href|url|@import)\s*[=(]?\s*["']?([^"'\s>)]+)""", html)
    assert len(loads) == 4
    assert all(address.startswith("data:image/svg+xml;base64,") for address in loads)
    assert not re.search(r"https?://|<script|<link|<iframe", html)


def test_every_figure_is_sound_and_has_words_for_those_who_cannot_see_it(shown):
    _, html = shown
    images = re.findall(r'<img alt="([^"]{20,})" src="data:image/svg\+xml;base64,([^"]+)">', html)
    assert len(images) == 4
    for _, data in images:
        svg = b64decode(data).decode()
        ElementTree.fromstring(svg)
        assert "currentColor" in svg
        assert not re.search(r"\b(nan|inf)\b", re.sub('"data:[^"]+"', "", svg))


def test_the_page_has_the_numbers(shown):
    found, html = shown
    text = read(html)
    assert unescape(found.summary) in text
    assert unescape(found.conclusion) in text
    rows = re.findall(r'<tr><th scope="row">(.*?)</th>(.*?)</tr>', html)
    names = ["frozen head", "Source-GDA", "transport, ungated", "transport, gated"]
    names = names[-len(found.scores) :]
    assert [name for name, _ in rows[: len(names)]] == names
    for (_, shown_cells), score in zip(rows, found.scores.values(), strict=False):
        cells = re.findall("<td>(.*?)</td>", shown_cells)
        interval = "none"
        if score.interval:
            interval = f"{100 * score.interval.low:.1f} to {100 * score.interval.high:.1f}"
        nll = f"{score.nll:.3f}" if math.isfinite(score.nll) else "infinite"
        assert cells == [f"{100 * score.accuracy:.1f}", interval, "1.3%", "2.7%", nll, "8.1"]
    for reason, count in found.reasons.items():
        share = f"{count / len(found.batches):.0%}"
        words = f'<td class="words">{REASONS[reason]}</td>'
        assert (reason, f"<td>{count:,}</td><td>{share}</td>{words}") in rows
    for name, value in vars(found.settings).items():
        assert any(row[0] == name and row[1].startswith(f"<td>{value:g}</td>") for row in rows)
    assert "SHA-256 of the state: c0ffee" in text
    assert "caster " in text


def test_the_page_shows_the_classes_changed_most(shown):
    found, html = shown
    changed = [c for c in found.classes if c.gated != c.baseline]
    rows = re.findall(r'<tr><th scope="row">(.*?)</th>(.*?)</tr>', html)
    listed = [unescape(name) for name, cells in rows if "<svg" in cells]
    if not changed:
        assert "The accuracy of no class changed." in html
        return
    by_net = sorted(changed, key=lambda c: c.baseline - c.gated)
    helped = [c for c in by_net if c.gated > c.baseline][:10]
    harmed = [c for c in by_net if c.gated < c.baseline][-10:]
    assert {c.gated - c.baseline for c in changed if str(c.label) in listed} == {
        c.gated - c.baseline for c in helped + harmed
    }
    assert len(listed) == len(helped) + len(harmed)


def test_a_warning_is_shown_and_none_is_not():
    found = made(n_batches=30, n_classes=10)
    assert "ordered by class" not in page.render(found)
    ordered = replace(found, batches=tuple(replace(b, classes=1) for b in found.batches))
    assert ordered.warning in read(page.render(ordered))


def test_without_logits_the_page_says_what_took_their_place():
    text = read(page.render(made(head=False)))
    assert "Source-GDA takes the frozen head's place" in text
    assert "samples that Source-GDA classifies correctly" in text
    assert "Not evaluated: no logits were given" in text


def test_a_long_stream_makes_no_large_page():
    assert len(page.render(made(n_batches=20_000))) < 2_000_000


def test_the_page_is_written_whole_and_repeats_to_the_byte(tmp_path):
    target = tmp_path / "page.html"
    target.write_text("old")
    write_page(made(), target)
    assert target.read_text(encoding="utf-8") == page.render(made())
    assert list(tmp_path.iterdir()) == [target]


def test_without_matplotlib_the_page_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(CasterError, match=r"pip install 'caster-tta\[report\]'"):
        write_page(made(), tmp_path / "page.html")
    assert not list(tmp_path.iterdir())


def test_evaluating_imports_no_matplotlib():
    code = "import sys, caster.report.evaluation; print('matplotlib' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert run.stdout.strip() == "False"


@pytest.mark.parametrize("tau", [0.003, 0.8, 200.0])
@pytest.mark.parametrize("ratios", [[], [0.0], [0.79, 0.81], [1e-9, 1.0], [0.5, 4e11, math.inf]])
def test_the_certificate_axis_has_ticks_and_a_position_for_every_ratio(ratios, tau):
    axis = CertificateAxis.of(ratios, tau)
    assert 0 < axis.low < tau < axis.high < axis.missing
    assert 1 <= len(axis.ticks) <= 14
    for ratio in ratios:
        assert axis.low <= axis.position(ratio) <= axis.missing
        assert (axis.position(ratio) > axis.high) == math.isinf(ratio)


def test_layer_transport_has_its_own_names_reasons_and_constants():
    own = {
        "mixture": False,
        "prior": 16.0,
        "memory": 64,
        "depth": 0.5,
        "maps": "diagonal",
        "tau": 0.125,
        "window": 256,
        "every": 1,
    }
    found = made(n_batches=8, accepted=0.0)
    verdicts = [Verdict(i > 2, "accepted" if i > 2 else "ratio", 0.5) for i in range(8)]
    batches = [replace(b, verdict=v) for b, v in zip(found.batches, verdicts, strict=True)]
    found = replace(found, mechanism=aligned_layers(own), batches=tuple(batches))
    html = page.render(found)
    text = read(html)
    assert "the answer with aligned layers is used" in text
    assert "certificate is above tau" in text
    assert "too few" not in text
    assert "layer transport, gated" in text
    assert "0.125 is accepted" in text
    for name, shown in (("prior", "16"), ("depth", "0.5"), ("maps", "diagonal"), ("tau", "0.125")):
        assert f'<th scope="row">{name}</th><td>{shown}</td>' in html
    assert not re.search(r"(?<!layer )transport, (un)?gated", unescape(html))
    plain = found.to_json()
    assert (plain["mechanism"], plain["method"]) == ("layers", "layer-transport")
    assert plain["settings"] == {n: own[n] for n in own if n not in ("every", "mixture")}
    assert plain["batches"][0]["verdict"] == {
        "accepted": False,
        "reason": "ratio",
        "ratio": 0.5,
        "confident": 0,
        "classes": 0,
    }


def drawn_words(found):
    """All text in the two figures that show verdicts."""
    texts = []
    for draw in (page.certificate_against_gain, page.along_the_stream):
        canvas = Figure(layout="constrained")
        draw(canvas, found, "#000000")
        texts += [text.get_text() for text in canvas.findobj(Text)]
    return texts


WORDS = {  # of each mechanism: noun, why there is no certificate, how else batches are rejected
    "transport": (
        "transport",
        "no confident sample or no map",
        "rejected otherwise",
    ),
    "layers": ("mixture transport", "the frozen model is fully confident"),
}


@pytest.mark.parametrize("name", WORDS)
def test_figures_use_the_words_of_their_mechanism(name):
    found, rejection = made(), "min_samples"
    if name == "layers":
        own = find("mixture-transport").options() | {"maps": "full", "tau": 1.0}
        found, rejection = replace(found, mechanism=aligned_layers(own)), "ratio"
    verdicts = [Verdict(False, rejection, math.inf), Verdict(False, "ratio", 1.5)]
    verdicts += [Verdict(True, "accepted", 0.5)] * (len(found.batches) - 2)
    batches = [replace(b, verdict=v) for b, v in zip(found.batches, verdicts, strict=True)]
    found = replace(found, batches=tuple(batches))
    noun, without, *uncovered = WORDS[name]
    rejected = {"rejected by certificate": 2 - len(uncovered), **dict.fromkeys(uncovered, 1)}
    texts = drawn_words(found)
    assert {text for text in texts if text.startswith("rejected")} == {
        *rejected,
        *(f"{how} ({count})" for how, count in rejected.items()),
    }
    for line in (
        f"{noun} less frozen head, points",
        f"certificate, log scale (none: {without})",
        *("accepted (10)", "accepted"),
        *(f"{noun}, ungated", f"{noun}, gated"),
    ):
        assert line in texts
    html = unescape(page.render(found))
    assert f'alt="Gain of {noun} over the frozen head against the certificate, ' in html
    others = {text for mechanism in WORDS.values() for text in mechanism} - {
        *WORDS[name],
        "transport",
    }
    assert not any(other in text for other in others for text in [*texts, html])
