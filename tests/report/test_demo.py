"""Laws that the results and the page of the demo obey, whatever the numbers are."""

import re
import sys
from dataclasses import replace
from html import unescape

import numpy as np
import pytest

from caster import CasterError
from caster.core.verdict import Verdict
from caster.report import demo_page
from caster.report import digits_demo as demo
from caster.report.digits_demo import Plan, Results, Stream
from caster.report.evaluation_results import Batch
from caster.report.mechanism import LAYER_CONSTANTS, LAYER_REASONS
from tests.support.command_line import cli, refusal


@pytest.fixture(scope="module")
def steps():
    return []


@pytest.fixture(scope="module")
def results(steps):
    return demo.run(progress=lambda *step: steps.append(step))


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    data = demo.split_digits()
    network = demo.train(data.source, data.source_labels)
    path = tmp_path_factory.mktemp("demo") / "digits.onnx"
    return data, network, demo.fitted(network, data, path)


@pytest.fixture(scope="module")
def html(results):
    return demo_page.render(results)


def of_size(size, frozen, ungated, gated, *, accepted):
    verdict = Verdict(accepted, "accepted" if accepted else "ratio", 0.5, 9, 3)
    right = {"frozen": frozen, "ungated": ungated, "gated": gated}
    return Batch(size, 3, right, verdict)


def test_the_network_is_good_on_clean_digits(results):
    assert results.clean.accuracy("frozen") > 0.95


def test_the_network_is_the_perceptron_it_was_trained_as(parts):
    data, network, _ = parts
    features, logits = network(data.source)
    assert features.shape[1] == network.weights[-1].shape[0]
    assert (features >= 0).all()
    assert np.mean(logits.argmax(axis=1) == data.source_labels) > 0.99


def test_the_onnx_file_is_the_network_and_is_adapted_by_its_layers(parts):
    data, network, adapter = parts
    features, logits = network(data.target)
    found = adapter.model(demo.inputs(data.target))
    np.testing.assert_allclose(found.features, features, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(found.logits, logits, rtol=1e-4, atol=1e-4)
    assert adapter.mechanism == "layers"


def test_source_and_target_share_no_digit(parts):
    data, _, _ = parts
    seen = {image.tobytes() for image in data.source}
    assert not any(image.tobytes() in seen for image in data.target)


@pytest.mark.parametrize("plan", demo.PLANS, ids=lambda plan: f"{plan.name} {plan.batch_size}")
def test_a_stream_holds_every_digit_once(plan):
    labels = demo.split_digits().target_labels
    rows = np.concatenate(list(demo.batch_rows(plan, labels)))
    assert np.array_equal(np.sort(rows), np.arange(demo.N_TARGET))


def test_one_stream_is_sorted_by_class_and_the_others_are_not():
    labels = demo.split_digits().target_labels
    for plan in demo.PLANS:
        seen = labels[np.concatenate(list(demo.batch_rows(plan, labels)))]
        assert (np.diff(seen) >= 0).all() == (plan.order == "sorted by class")
    assert sum(plan.order == "sorted by class" for plan in demo.PLANS) == 1


def test_the_streams_cover_clean_shifted_ordered_and_small(results):
    assert [Plan(s.shift, s.severity, s.batch_size, s.order) for s in results.streams] == list(
        demo.PLANS
    )
    swept = {(s.shift, s.severity) for s in results.streams if s.severity}
    assert swept == {(shift, s) for shift in demo.SHIFTS for s in demo.SEVERITIES}
    small = [s for s in results.streams if s.batch_size < demo.BATCH_SIZE]
    assert len(small) == 1
    for stream in results.streams:
        assert sum(batch.size for batch in stream.batches) == demo.N_TARGET
        assert sum(stream.reasons.values()) == len(stream.batches)


def test_shifts_repeat_grow_and_stay_in_range(parts):
    target = parts[0].target
    for shift in demo.SHIFTS:
        spoilt = [demo.shifted(target, shift, severity) for severity in demo.SEVERITIES]
        distances = [np.abs(images - target).mean() for images in spoilt]
        assert np.all(np.diff([0.0, *distances]) > 0), shift
        assert all(images.min() >= 0 and images.max() <= demo.WHITE for images in spoilt)
        assert np.array_equal(spoilt[-1], demo.shifted(target, shift, demo.SEVERITIES[-1]))


def test_a_stream_run_again_alone_is_identical(results, parts):
    data, _, adapter = parts
    again = demo.run_stream(demo.PLANS[3], data, adapter)
    assert again == results.streams[3]


def test_accuracies_recomputed_by_hand(results, parts):
    data, network, adapter = parts
    stream = adapter.new_stream()
    plan, found = demo.PLANS[10], results.streams[10]
    right = dict.fromkeys(demo.ANSWERS, 0)
    images = demo.shifted(data.target, plan.shift, plan.severity)
    for rows in demo.batch_rows(plan, data.target_labels):
        (_, logits), labels = network(images[rows]), data.target_labels[rows]
        out = stream(demo.inputs(images[rows]))
        right["frozen"] += (logits.argmax(axis=1) == labels).sum()
        right["ungated"] += (out.adapted.argmax(axis=1) == labels).sum()
        right["gated"] += (
            (out.adapted if out.verdict.accepted else logits).argmax(axis=1) == labels
        ).sum()
    assert {name: found.accuracy(name) for name in right} == {
        name: count / demo.N_TARGET for name, count in right.items()
    }


def test_accepted_batches_get_the_aligned_answer_and_others_the_frozen_one(results):
    for stream in results.streams:
        for batch in stream.batches:
            expected = "ungated" if batch.verdict.accepted else "frozen"
            assert batch.right["gated"] == batch.right[expected]


def test_where_nothing_is_accepted_gated_is_frozen(results):
    rejected = [stream for stream in results.streams if stream.acceptance == 0]
    assert rejected
    assert all(stream.accuracy("gated") == stream.accuracy("frozen") for stream in rejected)


def test_progress_counts_every_step_once(results, steps):
    total = len(demo.PLANS) + 1
    assert [done for done, _, _ in steps] == list(range(total + 1))
    assert {of for _, of, _ in steps} == {total}


def test_the_highlights_are_a_shuffled_a_shifted_and_a_sorted_stream(results):
    shuffled, shifted, ordered = (highlight.stream for highlight in results.highlights)
    assert shuffled == results.clean
    assert (shuffled.severity, shuffled.order) == (0, "shuffled")
    assert (shifted.shift, shifted.order) == ("haze", "shuffled")
    assert (ordered.severity, ordered.order) == (0, "sorted by class")
    assert shifted.accuracy("gated") > shifted.accuracy("frozen") + 0.1
    assert ordered.accuracy("gated") > ordered.accuracy("ungated") + 0.3
    gained = 100 * (shifted.accuracy("gated") - shifted.accuracy("frozen"))
    saved = 100 * (ordered.accuracy("gated") - ordered.accuracy("ungated"))
    assert [int(number) for number in re.findall(r"\d+", results.headline)] == [
        round(gained), round(saved),
    ]  # fmt: skip


def test_the_verdict_is_wrong_in_both_ways_and_the_demo_says_so(results):
    for highlight, better, worse in (
        (results.costs, "ungated", "gated"),
        (results.misses, "frozen", "gated"),
    ):
        assert highlight is not None
        lost = [s.accuracy(better) - s.accuracy(worse) for s in results.streams]
        assert max(lost) == highlight.stream.accuracy(better) - highlight.stream.accuracy(worse) > 0
        assert highlight.stream.description in highlight.sentence
        for answer in demo.ANSWERS:
            assert f"{highlight.stream.accuracy(answer):.1%}" in highlight.sentence


def test_a_run_without_mistakes_has_none_to_tell(results):
    batch = of_size(4, frozen=3, ungated=3, gated=3, accepted=True)
    plain = Results(0, results.settings, (Stream("clean", 0, 4, "shuffled", (batch,)),))
    assert plain.costs is None
    assert plain.misses is None


def test_a_highlight_counts_the_rejected_batches(results):
    batches = (
        of_size(4, frozen=2, ungated=3, gated=2, accepted=False),
        of_size(4, frozen=2, ungated=3, gated=3, accepted=True),
    )
    found = Results(0, results.settings, (Stream("blur", 2, 4, "shuffled", batches),))
    assert "1 of 2 batches" in found.costs.sentence


def test_a_verdict_is_explained_with_its_own_evidence(results):
    accepted = of_size(64, frozen=3, ungated=4, gated=4, accepted=True)
    words = demo.explained(accepted, results.settings)
    assert re.findall(r"[\d.]+\d|\d", words) == ["0.50", "1"]
    sure = replace(accepted, verdict=Verdict(False, "ratio", np.inf))
    assert "unbounded" in demo.explained(sure, results.settings)
    broken = replace(accepted, verdict=Verdict(False, "numerical", 0.5))
    assert LAYER_REASONS["numerical"] in demo.explained(broken, results.settings)


def test_the_page_loads_nothing(html):
    loads = re.findall(r"""(?:src|href|url|@import)\s*[=(]?\s*["']?([^"'\s>)]+)""", html)
    assert loads
    assert all(address.startswith("data:image/svg+xml;base64,") for address in loads)
    assert not re.search(r"https?://|<script|<link|<iframe", html)


def test_the_page_shows_three_figures_with_words_for_those_who_cannot_see_them(html):
    images = re.findall(r'<img alt="([^"]+)" src="data:image/svg\+xml;base64,[^"]{1000,}">', html)
    assert len(images) == 3


def test_the_page_has_headline_verdicts_every_row_and_constant(html, results):
    rows = re.findall(r'<tr><th scope="row">(.*?)</th>(.*?)</tr>', html)
    assert len(rows) == len(results.streams) + len(LAYER_CONSTANTS)
    for (name, cells), stream in zip(rows, results.streams, strict=False):
        assert name == stream.name
        for classifier in demo.ANSWERS:
            assert f"<td>{100 * stream.accuracy(classifier):.1f}</td>" in cells
    text = unescape(html)
    shown = (*results.highlights, results.costs, results.misses)
    assert all(highlight.sentence in text for highlight in shown)
    assert results.headline in text
    for highlight in results.highlights:
        explained = (demo.explained(batch, results.settings) for batch in highlight.stream.batches)
        assert any(words in text for words in explained)
    assert not re.search(r"{[{%]|[%}]}", re.sub(r'"data:[^"]+"', "", text))  # no placeholder


def test_the_page_replaces_the_file_before_it_and_repeats_to_the_byte(tmp_path, html, results):
    target = tmp_path / "demo.html"
    target.write_text("old")
    demo.write_page(results, target)
    assert target.read_text(encoding="utf-8") == html
    assert list(tmp_path.iterdir()) == [target]


@pytest.mark.parametrize("missing", [("onnx",), ("onnx", "matplotlib")])
def test_the_demo_names_every_library_that_it_misses_before_it_runs(missing, monkeypatch):
    for library in missing:
        monkeypatch.setitem(sys.modules, library, None)
    words = f"needs {', '.join(missing)}: pip install 'caster-tta[onnx,report]'"
    assert words in refusal(cli("demo", columns=200))


def test_without_matplotlib_the_page_says_what_to_install(tmp_path, results, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(CasterError, match=r"pip install 'caster-tta\[report\]'") as caught:
        demo.write_page(results, tmp_path / "demo.html")
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())
