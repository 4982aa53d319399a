"""A run is packed as it is, and the miniature's report comes from its pack, byte for byte."""

from __future__ import annotations

import shutil

from caster_bench.engine.pack import pack
from caster_bench.records import Pack
from caster_bench.studies import write as writing
from caster_bench.studies.read import load
from caster_bench.studies.verify import verify
from tests.bench.studies.test_report import files
from tests.support.inline import run_inline, sweep_of


def test_the_miniature_is_reported_from_its_pack(miniature, checkpoints, tmp_path):
    sweep, out = miniature
    packed = Pack(tmp_path / "pack")
    done, problems = pack(sweep, out, packed, checkpoints)
    assert problems == []
    assert (done.cells, done.missing) == (len(sweep.cells), 0)
    for name, where in (("run", out), ("pack", packed)):
        results, _ = load(sweep, where)
        writing.write(results, tmp_path / f"report-{name}")
    assert files(tmp_path / "report-pack") == files(tmp_path / "report-run")


def test_a_backbone_that_is_trained_after_it_was_packed(checkpoints, tmp_path):
    """Its refusals are packed first, and then what became of it."""
    sweep, packed = sweep_of(tmp_path), Pack(tmp_path / "pack")
    root = tmp_path / "root"
    (root / "checkpoints").mkdir(parents=True)
    summary, _ = run_inline(sweep, tmp_path / "before", root)
    assert (summary.cells, summary.refused) == (0, 6)
    assert pack(sweep, tmp_path / "before", packed, root)[0].cells == 6
    shutil.copy(checkpoints / "checkpoints" / "resnet.safetensors", root / "checkpoints")
    summary, _ = run_inline(sweep, tmp_path / "after", root)
    assert (summary.cells, summary.refused) == (6, 0)
    done, problems = pack(sweep, tmp_path / "after", packed, root)
    assert problems == []
    assert (done.cells, done.new, done.missing) == (6, 6, 0)
    results, _ = load(sweep, packed, root)
    assert (len(results.scores), results.refused) == (6, {})
    refused = Pack(tmp_path / "refused")  # as a pack of its own it gives way too, and takes nothing
    pack(sweep, tmp_path / "before", refused, root)
    assert pack(sweep, refused, packed, root)[0].new == 0
    assert pack(sweep, packed, refused, root)[0].new == 6
    assert verify(sweep, refused, root) == []
    # and a machine without the checkpoint, later, takes nothing away
    done, problems = pack(sweep, tmp_path / "before", packed, root)
    assert (done.cells, done.new, problems) == (6, 0, [])
    assert verify(sweep, packed, root) == []
