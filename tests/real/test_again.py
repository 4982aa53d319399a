"""Compare two runs of one sweep cell by cell (benchmarks/real/again.py)."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from caster_bench.engine.pack import pack
from caster_bench.records.store import Pack
from tests.support.altered_records import altered, change_a_prediction
from tests.support.consistent_records import Consistent, sweep_of

sys.path.append(str(Path(__file__).parents[2] / "benchmarks" / "real"))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("once")
    sweep = sweep_of(folder)
    maker = Consistent(sweep, n=64, classes=4)
    return sweep, maker, maker.make(folder / "out")


def test_a_run_and_its_pack_are_the_same_and_one_image_makes_them_differ(run, tmp_path, capsys):
    from again import compare, main

    sweep, maker, out = run
    packed = Pack(tmp_path / "pack")
    assert pack(sweep, out, packed)[1] == []
    rows = compare(out, packed.folder, [])
    methods = {(backbone, row): same for (backbone, row), same in rows.items() if row != "weights"}
    assert sum(map(len, methods.values())) == len(sweep.cells)
    assert all(map(all, rows.values()))

    spec = next(spec for spec in sweep.cells if spec.method == "tent")
    other = altered(out, tmp_path, maker, spec, change_a_prediction)
    rows = compare(packed.folder, other, [spec.backbone])
    assert {backbone for backbone, _ in rows} == {spec.backbone}
    wrong = {row: same.count(False) for (_, row), same in rows.items()}
    assert wrong.pop("tent") == 1
    assert set(wrong.values()) == {0}

    main(out, packed.folder, [])
    assert "the same" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="no cell in common"):
        main(out, tmp_path / "nothing", [])
