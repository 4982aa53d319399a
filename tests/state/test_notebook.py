"""What a notebook shows: well-formed tables, with text that cannot become markup."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ElementTree

import numpy as np

import caster
from caster import Caster
from caster.core.notebook import html_table
from caster.core.verdict import Verdict, reject
from tests.support import problem


def rows_of(html: str) -> dict[str, str]:
    table = ElementTree.fromstring(html)
    return {row[0].text or "": row[1].text or "" for row in table.iter("tr")}


def example():
    labels = np.arange(60) % 3
    features = np.random.default_rng(0).normal(size=(60, 4)) + 9 * np.eye(3, 4)[labels]
    return Caster().fit(features, labels), features - [9.0, 0.0, 0.0, 0.0]


def test_an_adaptation_shows_its_verdict_and_what_it_changed():
    clf, shifted = example()
    out = clf.adapt(shifted)
    rows = rows_of(out._repr_html_())
    frozen = np.argmax(np.asarray(out.frozen), axis=1)
    changed = np.count_nonzero(np.argmax(np.asarray(out.adapted), axis=1) != frozen)
    assert changed > 0
    assert rows["adapted and frozen answers differ"] == f"on {changed} samples"
    assert rows["samples"] == "60"
    assert rows["classes"] == "3"
    assert rows_of(out.verdict._repr_html_()).items() <= rows.items()


def test_a_verdict_shows_why_it_rejects():
    rows = rows_of(reject("batch_too_small")._repr_html_())
    assert rows == {"verdict": "rejected: a batch of one", "ratio": "inf"}


def test_a_state_shows_its_source_and_what_it_is_bound_to():
    rows = rows_of(example()[0]._state._repr_html_())
    assert rows["source"] == "60 samples of 3 classes"
    assert rows["features"] == "4, of which 2 directions are stored"
    assert rows["bound to model"] == "not bound"


def test_a_resting_stream_shows_that_nothing_was_measured():
    rows = rows_of(Verdict(True, "rest", math.nan)._repr_html_())
    assert rows == {
        "verdict": "accepted: not compared, the last verdict still applies",
        "ratio": "not measured",
    }


def test_an_adapter_and_its_streams_show_what_they_are():
    images, labels = problem.make_images(120, seed=2)
    adapter = caster.fit(problem.model(), [(images, labels)])
    rows = rows_of(adapter._repr_html_())
    assert rows["model"] == adapter.model.name
    assert rows["mechanism"] == "layers"
    assert rows_of(adapter.state._repr_html_()).items() <= rows.items()
    stream = adapter.new_stream()
    stream(images[:40])
    assert rows_of(stream._repr_html_()) == {
        "samples so far": "40", "mechanism": "layers", "decided by labels": "no",
    }  # fmt: skip


def test_text_is_escaped():
    assert rows_of(html_table("<b>", {"<script>": "a & b"})) == {"<script>": "a & b"}
