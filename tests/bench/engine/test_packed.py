"""Packing a run, and the miniature's report from its pack, byte for byte."""

from __future__ import annotations

import shutil

import pytest

from caster_bench.engine.pack import pack
from caster_bench.records.store import Pack
from caster_bench.studies import report as reporting
from caster_bench.studies.results import load
from caster_bench.studies.verify import verify
from tests.support.inline import run_inline, sweep_of
from tests.support.report_files import files

pytestmark = pytest.mark.usefixtures("listed_figures")


@pytest.mark.slow
def test_the_miniature_is_reported_from_its_pack(miniature, checkpoints, tmp_path):
    sweep, out = miniature
    packed = Pack(tmp_path / "pack")
    done, problems = pack(sweep, out, packed, checkpoints)
    assert problems == []
    assert (done.cells, done.missing) == (len(sweep.cells), 0)
    for name, where in (("run", out), ("pack", packed)):
        results, _ = load(sweep, where)
        reporting.write_report(results, tmp_path / f"report-{name}")
    assert files(tmp_path / "report-pack") == files(tmp_path / "report-run")


def test_a_backbone_trained_after_its_rejection_was_packed(checkpoints, tmp_path):
    """Its rejections are packed first, then its results replace them."""
    sweep, packed = sweep_of(tmp_path), Pack(tmp_path / "pack")
    root = tmp_path / "root"
    (root / "checkpoints").mkdir(parents=True)
    summary, _ = run_inline(sweep, tmp_path / "before", root)
    assert (summary.cells, summary.rejected) == (0, 6)
    assert pack(sweep, tmp_path / "before", packed, root)[0].cells == 6
    shutil.copy(checkpoints / "checkpoints" / "resnet.safetensors", root / "checkpoints")
    summary, _ = run_inline(sweep, tmp_path / "after", root)
    assert (summary.cells, summary.rejected) == (6, 0)
    done, problems = pack(sweep, tmp_path / "after", packed, root)
    assert problems == []
    assert (done.cells, done.new, done.missing) == (6, 6, 0)
    results, _ = load(sweep, packed, root)
    assert (len(results.scores), results.rejected) == (6, {})
    rejected = Pack(tmp_path / "rejected")  # in a pack of its own, results replace it too
    pack(sweep, tmp_path / "before", rejected, root)
    assert pack(sweep, rejected, packed, root)[0].new == 0
    assert pack(sweep, packed, rejected, root)[0].new == 6
    assert verify(sweep, rejected, root) == []
    # a later pack from a machine without the checkpoint removes nothing
    done, problems = pack(sweep, tmp_path / "before", packed, root)
    assert (done.cells, done.new, problems) == (6, 0, [])
    assert verify(sweep, packed, root) == []
