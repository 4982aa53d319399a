"""`caster monitor` from a real log: table, JSON, and the page in a real browser."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import numpy as np
import pytest

from caster import state as states
from caster.monitor import page
from caster.monitor.log import StreamLog, read
from caster.monitor.stream_metrics import HELP
from tests.support.browser import Page, browsing, serving_folder
from tests.support.command_line import cli as invoke
from tests.support.monitored import FEW, PRIORS, adapter, draw, head

ROOT = Path(__file__).parents[2]
BATCH = 64
HOSTILE = '</script><b id="injected">x'  # a stream's id is anyone's


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Logs of three streams: one by `predict --log`, one with other classes, one hostile."""
    made = tmp_path_factory.mktemp("monitor")
    states.save(adapter().state, made / "s.caster")
    z, _, _ = draw(np.random.default_rng(1), 20 * BATCH)
    np.savez(made / "target.npz", features=z, logits=head(z))
    options = ("-o", made / "calm.csv", "--log", made / "logs")
    done = invoke("predict", made / "s.caster", made / "target.npz", *options)
    assert done.exit_code == 0, done.output
    rng, stream = np.random.default_rng(2), adapter().new_stream()
    log = StreamLog(made / "logs", "turning", adapter().state)
    for i in range(40):
        z, _, y = draw(rng, BATCH, PRIORS if i < 20 else FEW)
        out = stream(z)
        log.append(out, position=i * BATCH, time=1.79e9 + i)
        stream.feedback(out.ids[:4], y[:4])
        log.feedback(out.ids[:4], y[:4], betting=stream.betting, time=1.79e9 + i)
    log = StreamLog(made / "logs", HOSTILE, adapter(sketch=False).state)
    log.append(adapter(sketch=False)(z), position=0, time=0.0)
    return made / "logs"


def test_predict_writes_the_log_of_its_answers(folder):
    monitor = read(folder, "calm")
    table = np.loadtxt(
        folder.parent / "calm.csv", str, delimiter=",", skiprows=1, usecols=(0, 1, 5)
    )
    accepted = {row[1] for row in table if row[2] == "accepted"}
    assert (monitor.position, monitor.batches) == (len(table), 20)
    assert monitor.accepted == len(accepted)
    assert monitor.drift is not None
    assert monitor.points[0]["time"] > 1.7e9  # now


def test_predict_names_the_stream_by_its_option(folder, tmp_path):
    made = folder.parent
    options = ("-o", tmp_path / "x.csv", "--log", tmp_path / "logs", "--stream", "gate 3")
    done = invoke("predict", made / "s.caster", made / "target.npz", *options)
    assert done.exit_code == 0
    assert read(tmp_path / "logs", "gate 3").batches == read(folder, "calm").batches
    done = invoke("predict", made / "s.caster", made / "target.npz", *options[:2], *options[4:])
    assert done.exit_code == 1
    assert "--stream requires --log" in done.output
    done = invoke("predict", made / "s.caster", made / "target.npz", *options[:-1], "")
    assert done.exit_code == 1
    assert re.fullmatch(r"caster: a stream id has 1 to \d+ bytes, not ''\n", done.stderr)


def test_a_log_of_ungated_answers_is_rejected(folder):
    made = folder.parent
    options = ("-o", made / "x.csv", "--log", made / "logs", "--no-gate")
    done = invoke("predict", made / "s.caster", made / "target.npz", *options)
    assert done.exit_code == 1
    assert "--no-gate" in done.output


def test_the_table_names_streams_and_alarms(folder):
    """On a terminal of 80 columns."""
    done = invoke("monitor", folder)
    assert done.exit_code == 0
    assert "3 streams" in done.output
    (row,) = [line for line in done.output.splitlines() if line.startswith(" turning")]
    assert "revoked" in row
    assert "classes" in done.output
    assert "turning, since sample 1," in done.output
    assert "without a sketch" in done.output


def test_a_stream_may_have_no_batch_yet(tmp_path):
    StreamLog(tmp_path, "starting", adapter().state)
    result = invoke("monitor", tmp_path)
    assert result.exit_code == 0, result.output
    assert "starting" in result.output


def test_json_is_the_data_of_the_page(folder):
    data = json.loads(invoke("monitor", folder, "--stream", "turning", "--json").output)
    assert [stream["name"] for stream in data["streams"]] == ["turning"]
    monitor = read(folder, "turning")
    (stream,) = data["streams"]
    assert stream["samples"] == data["samples"] == 40 * BATCH
    assert stream["accuracy"] == monitor.accuracy
    assert len(stream["points"]) == 40
    assert stream["labels"] == 160


def test_what_cannot_be_shown_ends_in_one_line(folder, tmp_path):
    for args in ((tmp_path / "none",), (folder, "--stream", "none"), (folder, "-o", tmp_path)):
        done = invoke("monitor", *args)
        assert done.exit_code == 1
        assert len(done.output.strip().splitlines()) == 1


def test_many_streams_have_a_bounded_page(tmp_path):
    out = adapter()(draw(np.random.default_rng(0), BATCH)[0])
    for i in range(30):
        log = StreamLog(tmp_path, f"s{i}", adapter().state)
        log.append(out, position=0, time=float(i))
    data = page.from_folder(tmp_path)
    assert len(data["streams"]) == 30
    assert [s["name"] for s in data["streams"] if s["points"]] == [
        f"s{i}" for i in range(29, 5, -1)
    ]


def test_the_dashboard_shows_metrics_that_exist():
    dashboard = json.loads((ROOT / "examples/monitoring/grafana.json").read_text())
    expressions = [t["expr"] for panel in dashboard["panels"] for t in panel["targets"]]
    named = set(re.findall(r"caster_stream_(\w+)", " ".join(expressions)))
    assert named <= set(HELP)
    assert {"alarm", "estimated_accuracy", "drift_psi", "risk", "batches_total"} <= named
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])


def test_the_code_of_the_document_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    first, second = re.findall(
        r"```python\n(.*?)```", (ROOT / "docs/monitoring.md").read_text(), re.DOTALL
    )
    parts = [draw(rng, BATCH) for _ in range(3)]
    truth = iter([([], []), ([5], [int(parts[0][2][5])]), ([], [])])
    names = {
        "adapter": adapter(),
        "batches": [z for z, _, _ in parts],
        "known_labels": lambda: next(truth),
    }
    exec(first, names)
    assert (names["log"].monitor.batches, names["log"].monitor.labels) == (3, 1)
    exec(second, {})
    assert "caster_stream_samples_total {'stream': 'gate 3'} 192.0" in capsys.readouterr().out


# In a browser


@pytest.fixture(scope="module")
def opened(folder):
    made = folder.parent / "page.html"
    assert invoke("monitor", folder, "--output", made).exit_code == 0
    with browsing() as browser:
        browser.send("Network.enable")
        browser.send("Network.setCacheDisabled", cacheDisabled=True)
        browser.open(made.as_uri())
        yield browser


def texts(browser: Page, selector: str) -> list[str]:
    return browser.evaluate(f"[...document.querySelectorAll('{selector}')].map(e => e.textContent)")


def click(browser: Page, name: str) -> None:
    chosen = f"b => b.textContent === {json.dumps(name)}"
    browser.evaluate(f"[...document.querySelectorAll('tbody button')].find({chosen}).click()")


def test_the_page_shows_every_stream_and_loads_nothing(opened):
    assert texts(opened, "tbody button") == ["all streams", "turning", "calm", HOSTILE]
    assert opened.evaluate("document.getElementById('injected')") is None
    assert texts(opened, "h3") == [
        "Verdicts", "Certificate", "Estimated accuracy", "Drift of the images",
        "Drift of the classes", "Predicted classes", "Risk without labels",
    ]  # fmt: skip
    rung = {page.ALARMS[kind][0] for kind in ("classes", "revoked")}
    assert set(texts(opened, ".alarm:not(.over) b")) == rung
    assert opened.evaluate("document.querySelectorAll('.chart.wide rect').length") == 40
    assert any("Labels: 160 known" in text for text in texts(opened, ".note"))
    loaded = opened.evaluate("performance.getEntriesByType('resource').map(entry => entry.name)")
    assert [name for name in loaded if not name.startswith("data:")] == []
    assert opened.errors == []


def test_streams_can_be_chosen(opened):
    click(opened, HOSTILE)
    assert texts(opened, "h2") == [HOSTILE]
    assert any("no sketch" in text for text in texts(opened, ".note"))
    assert texts(opened, "h3") == ["Verdicts", "Certificate", "Predicted classes"]
    click(opened, "all streams")
    assert opened.evaluate("document.querySelectorAll('.chart.wide rect').length") == 20 + 40 + 1
    click(opened, "turning")
    assert opened.errors == []


@pytest.mark.parametrize("dark", [False, True])
def test_it_fits_a_phone_in_light_and_dark(opened, dark):
    opened.resize(360, 740, dark=dark)
    opened.evaluate("draw()")
    assert opened.evaluate("document.documentElement.scrollWidth") <= 360
    background = opened.evaluate("getComputedStyle(document.body).backgroundColor")
    assert background == ("rgb(20, 23, 28)" if dark else "rgb(255, 255, 255)")
    tree = opened.send("Accessibility.getFullAXTree")["nodes"]
    named = [n for n in tree if n.get("role", {}).get("value") in ("button", "image")]
    assert all(node["name"]["value"] for node in named)
    assert len(named) >= 11
    assert opened.errors == []


def test_a_live_page_asks_for_its_data(folder, tmp_path, opened):
    made = page.render(page.from_folder(folder, "calm"), live="data.json")
    (tmp_path / "index.html").write_text(made)
    (tmp_path / "data.json").write_text(json.dumps(page.from_folder(folder, "turning")))
    with serving_folder(tmp_path) as address:
        opened.open(address + "index.html")
        assert texts(opened, "h2") == ["calm"]
        opened.evaluate("refresh()")  # as it does every few seconds
        assert texts(opened, "h2") == ["turning"]
        assert opened.errors == []
    for _ in range(50):  # a connection may outlive the server for a moment
        opened.evaluate("refresh()")
        if texts(opened, "#when") == ["the server does not answer: this is what it said last"]:
            break
        time.sleep(0.1)
    else:
        pytest.fail(f"the page says {texts(opened, '#when')}")
    assert texts(opened, "h2") == ["turning"]
