"""The page of examples/browser, and the file it runs, in a real browser and in Node.js."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from caster.report.digits_demo import split_digits
from tests.support.browser import HAS_WEBGPU, Page, browsing, onnxruntime_web, serving_folder
from tests.support.compiled_stream import CompiledStream
from tests.support.onnx_streams import in_browser, same_answers
from tests.support.sampling import sampled

pytestmark = [pytest.mark.slow, pytest.mark.whole]  # trains and compiles a network
ROOT = Path(__file__).parents[2]
SEVEN = ((0.25, 0.2), (0.78, 0.2), (0.65, 0.45), (0.5, 0.7), (0.42, 0.9))  # a stroke, in shares


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """The page, built by the command of its documentation."""
    folder = tmp_path_factory.mktemp("site")
    script = ROOT / "examples" / "browser" / "build.py"
    command = [sys.executable, script, folder, "--runtime", onnxruntime_web()]
    subprocess.run(command, check=True)
    return folder


@pytest.fixture(scope="module")
def opened(site):
    with serving_folder(site) as address, browsing() as page:
        yield page, address


@pytest.fixture
def page(opened) -> Page:
    """The page, opened again, paused, with clean images."""
    page, address = opened
    page.errors.clear()
    page.open(address + "index.html")
    page.wait_for("!document.getElementById('start').disabled")
    page.evaluate("document.getElementById('start').click()")
    set_sliders(page, noise=0, fog=0, contrast=100)
    return page


def set_sliders(page: Page, **values: int) -> None:
    for name, value in values.items():
        page.evaluate(
            f"{{ const slider = document.getElementById('{name}'); slider.value = {value};"
            "slider.dispatchEvent(new Event('input')) }"
        )


def text(page: Page, name: str) -> str:
    return page.evaluate(f"document.getElementById('{name}').textContent")


def click(page: Page, name: str) -> None:
    page.evaluate(f"document.getElementById('{name}').click()")


def share(page: Page, name: str) -> float:
    return float(text(page, name).removesuffix(" %")) / 100


def run_batches(page: Page, count: int) -> None:
    """Start a stream from its first batch, and pause it after this many."""
    click(page, "reset")
    page.wait_for("document.getElementById('batches').textContent === '0'")
    click(page, "start")
    page.wait_for(f"Number(document.getElementById('batches').textContent) >= {count}")
    click(page, "start")


@pytest.mark.parametrize(
    "shift", sampled([{"noise": 30}, {"fog": 40}, {"contrast": 50}], 1), ids=str
)
def test_adapts_to_a_shift(page, shift):
    set_sliders(page, **shift)
    run_batches(page, 20)
    assert share(page, "adapted") > share(page, "frozen") + 0.03
    assert re.match(r"(Accepted|Rejected): \w.*\.$", text(page, "decision"))
    assert re.match(r"Ratio \d+\.\d\d; accepted up to \d+\.\d\d\.$", text(page, "measured"))
    assert page.evaluate("document.querySelector('polyline.adapted').points.length") >= 20
    assert page.errors == []


def test_clean_digits_are_read_well_by_both(page):
    run_batches(page, 5)
    assert share(page, "frozen") > 0.9
    assert share(page, "adapted") > 0.9
    assert page.errors == []


def test_pauses_and_starts_again(page):
    run_batches(page, 2)
    page.evaluate("new Promise(done => setTimeout(done, 300))")
    paused = text(page, "batches")
    page.evaluate("new Promise(done => setTimeout(done, 600))")
    assert text(page, "batches") == paused
    click(page, "reset")
    page.wait_for("document.getElementById('batches').textContent === '0'")
    assert page.evaluate("document.querySelector('polyline.adapted').points.length") == 0
    assert page.errors == []


def test_reads_a_drawn_digit(page):
    draw(page, SEVEN)
    page.wait_for("document.getElementById('yours').textContent.includes('sees')")
    assert text(page, "yours") == "The frozen network sees a 7, the adapted one a 7."
    click(page, "clear")
    assert text(page, "yours") == "Nothing drawn yet."
    assert page.errors == []


def draw(page: Page, stroke) -> None:
    left, top, size = page.evaluate(
        "(() => { const canvas = document.getElementById('draw'); canvas.scrollIntoView();"
        "const box = canvas.getBoundingClientRect(); return [box.left, box.top, box.width] })()"
    )
    kinds = ("mousePressed", *["mouseMoved"] * (len(stroke) - 1), "mouseReleased")
    for kind, (x, y) in zip(kinds, (*stroke, stroke[-1]), strict=True):
        where = {"x": left + x * size, "y": top + y * size}
        held = {"button": "left", "buttons": int(kind != "mouseReleased"), "clickCount": 1}
        page.send("Input.dispatchMouseEvent", type=kind, **where, **held)


UPLOAD = """
(async () => {
  const canvas = Object.assign(document.createElement("canvas"), {width: 120, height: 200});
  const pen = canvas.getContext("2d");
  pen.fillStyle = "%s"; pen.fillRect(0, 0, 120, 200);
  pen.strokeStyle = "%s"; pen.lineWidth = 22;
  for (const [x, y] of %s) pen.lineTo(120 * x, 200 * y);
  pen.stroke();
  const blob = await new Promise(done => canvas.toBlob(done));
  const files = new DataTransfer(), input = document.getElementById("upload");
  files.items.add(new File([%s], "digit.png"));
  input.files = files.files;
  input.dispatchEvent(new Event("change"));
})()
"""


@pytest.mark.parametrize(("paper", "ink"), [("white", "navy"), ("black", "gold")])
def test_reads_an_uploaded_digit_whatever_its_colours(page, paper, ink):
    page.evaluate(UPLOAD % (paper, ink, [list(point) for point in SEVEN], "blob"))
    page.wait_for("document.getElementById('yours').textContent.includes('sees')")
    assert text(page, "yours") == "The frozen network sees a 7, the adapted one a 7."
    assert page.errors == []


def test_says_that_a_file_is_no_image(page):
    page.evaluate(UPLOAD % ("white", "navy", [[0, 0]], "'no image'"))
    page.wait_for("document.getElementById('yours').textContent.includes('not an image')")
    assert page.errors == []


def test_fits_a_phone_and_names_its_controls(page):
    run_batches(page, 1)
    page.resize(360, 740)
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    tree = page.send("Accessibility.getFullAXTree")["nodes"]
    controls = [n for n in tree if n.get("role", {}).get("value") in ("button", "slider", "image")]
    names = {control["name"]["value"] for control in controls}
    assert "" not in names
    assert {"Start", "Reset", "Noise", "Fog", "Contrast", "Clear"} <= names


# --- the compiled file --------------------------------------------------------------------------


def noisy_batches(count: int) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    digits = split_digits().target[: 32 * count, None] / 16
    images = np.clip(digits + rng.normal(0, 0.3, digits.shape), 0, 1).astype(np.float32)
    return np.split(images, count)


@pytest.mark.parametrize(
    "provider",
    ["wasm", pytest.param("webgpu", marks=pytest.mark.whole)],  # a minute without a GPU
)
def test_the_compiled_file_gives_the_same_in_a_browser(site, provider):
    batches = noisy_batches(20)
    with serving_folder(site) as address, browsing() as page:
        page.open(address + "blank")
        if provider == "webgpu" and not page.evaluate(HAS_WEBGPU):
            pytest.skip("this browser has no WebGPU")
        answers = in_browser(page, address, "adaptive.onnx", batches, provider)
    stream = CompiledStream(site / "adaptive.onnx")
    same_answers(answers, [stream.run(batch) for batch in batches])


def test_the_example_in_javascript_gives_the_same_in_node(site, tmp_path):
    node = shutil.which("node")
    if node is None:
        pytest.skip("no node on the PATH to run the example with")
    for name in ("stream.mjs", "predict.mjs"):
        shutil.copy(ROOT / "examples" / "javascript" / name, tmp_path)
    (tmp_path / "node_modules").symlink_to(onnxruntime_web().parents[1])
    batches = noisy_batches(5)
    np.save(tmp_path / "images.npy", np.concatenate(batches))
    # Its own dependencies are beside the link; what the link points to may not be `node_modules`.
    node_here = [node, "--preserve-symlinks"]
    command = [*node_here, "predict.mjs", site / "adaptive.onnx", "images.npy", "32"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    stream = CompiledStream(site / "adaptive.onnx")
    for line, batch in zip(done.stdout.splitlines(), batches, strict=True):
        answer = stream.run(batch)
        verdict, ratio, labels = re.fullmatch(r"(.*), ratio (.*): (.*)", line).groups()
        rejected = f"rejected, reason {answer['reason']}"
        assert verdict == ("accepted" if answer["accepted"] else rejected)
        assert float(ratio) == pytest.approx(float(answer["ratio"]), abs=6e-4)
        assert labels.split() == [str(label) for label in answer["labels"]]
