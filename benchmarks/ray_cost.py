"""What fitting a billion images on a cluster costs, from constants that `ray_fit.py` prints.

    python benchmarks/ray_cost.py                         # the table of docs/clusters.md
    python benchmarks/ray_cost.py --model-ms 0.4 --cores 64 --core-hour 2.5   # a model on GPUs

Defaults are what was measured, on the machine that docs/clusters.md names; prices are assumptions.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, fields

from caster.adapt.ray_blocks import block_rows


@dataclass(frozen=True)
class Constants:
    """Inputs of the calculation, an option each."""

    rows: float = 1e9
    features: int = 2_048
    cores: int = 256
    model_ms: float = 166.1  # per image on one core
    pass_1: float = 9603.0  # rows per second of one core, reading included
    pass_2: float = 8345.0
    mb_1: float = 49.9  # that a block sends in the first pass
    mb_2_random: float = 78.0  # in the second, if classes come in random order
    mb_2_sorted: float = 2.7  # if they come one after another
    merge_1: float = 0.202  # seconds of the driver for a block
    merge_2: float = 0.022
    driver: float = 9.0  # seconds between and after the passes
    core_hour: float = 0.05  # dollars: an assumption
    gigabyte: float = 0.01  # dollars for one sent to another zone: an assumption


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for field in fields(Constants):
        option = f"--{field.name.replace('_', '-')}"
        parser.add_argument(option, type=type(field.default), default=field.default)
    given = Constants(**vars(parser.parse_args()))
    rows, size = given.rows, block_rows(int(given.rows))
    blocks = -(-int(rows) // size)
    model = rows * given.model_ms / 1000 / 3600
    sums = rows * (1 / given.pass_1 + 1 / given.pass_2) / 3600
    merging = blocks * (given.merge_1 + given.merge_2) / 3600
    hours = max((model + sums) / given.cores, merging) + given.driver / 3600
    sent = {
        "random order": blocks * (given.mb_1 + given.mb_2_random) / 1000,
        "class by class": blocks * (given.mb_1 + given.mb_2_sorted) / 1000,
    }
    lines = [
        ("blocks", f"{rows:,.0f} / {size:,}", f"{blocks:,}"),
        ("model", f"rows · {given.model_ms:g} ms", f"{model:,.0f} core-hours"),
        (
            "reading twice and sums",
            f"rows / {given.pass_1:,.0f} + rows / {given.pass_2:,.0f} s",
            f"{sums:,.0f} core-hours, {sums / model:.1%} of the model's",
        ),
        (
            "merging, on the driver",
            f"blocks · ({given.merge_1:g} + {given.merge_2:g}) s",
            f"{merging:.1f} hours, while workers work",
        ),
        (
            f"whole fit with {given.cores} cores",
            f"the larger of cores' and driver's time, and {given.driver:.0f} s",
            f"{hours:.1f} hours",
        ),
        *(
            (
                f"statistics sent, {order}",
                f"blocks · ({given.mb_1:g} + {mb:g}) MB",
                f"{sent[order]:,.0f} GB",
            )
            for order, mb in zip(sent, (given.mb_2_random, given.mb_2_sorted), strict=True)
        ),
        (
            "features, if they were sent",
            f"rows · {given.features:,} · 4 bytes",
            f"{rows * given.features * 4 / 1e9:,.0f} GB",
        ),
        (
            "cores",
            f"{model + sums:,.0f} core-hours at {given.core_hour:g} dollars",
            f"{(model + sums) * given.core_hour:,.0f} dollars",
        ),
        (
            "network, random order",
            f"at {given.gigabyte:g} dollars per GB",
            f"{sent['random order'] * given.gigabyte:,.0f} dollars",
        ),
    ]
    print("| | | |\n|---|---|--:|")
    for line in lines:
        print(f"| {' | '.join(line)} |")


if __name__ == "__main__":
    main()
