"""Which methods are measured under which conditions: for behaviour, and for the referee."""

from __future__ import annotations

from conditions import REPORTED, conditions
from subjects import CONVNEXT, RESNET18, VIT, Run, Subject
from tables import THRESHOLDS
from variants import Variant, published, suited
from work import Job, carry_out

from caster_bench.data.corruptions import SPARE
from caster_bench.methods.registry import find

NETWORKS = (RESNET18, CONVNEXT, VIT)
SLOW = ("cotta", "foa")  # dozens of passes through the network a batch
SLOW_ORDER = ("gaussian_noise-5", "fog-5", "clean", "jpeg_compression-5", "contrast-5")


def behaviour(run: Run, workers: int, seconds: float, slow_cells: int) -> None:
    """Every method as published; the slow ones on the first few conditions of their own list."""
    wanted = ["gaussian_noise-5", "fog-5"] if run.tiny else conditions(REPORTED, (5, 3))
    slow = [condition for condition in SLOW_ORDER if condition in wanted][:slow_cells]

    def plan(subject: Subject) -> list[Job]:
        every = suited(subject)
        quick = tuple(variant for variant in every if variant.name not in SLOW)
        jobs = [Job(subject.name, condition, quick) for condition in wanted]
        late = [variant for variant in every if variant.name in SLOW]
        return jobs + [Job(subject.name, c, (v,)) for c in slow for v in late]

    carry_out(run, "behaviour", NETWORKS, plan, workers, seconds)


def referee(run: Run, workers: int, seconds: float) -> None:
    """Tent behind referees of every threshold, on the spare corruptions alone.

    It must have something to learn: on networks without BatchNorm it is Tent as published for
    LayerNorm.
    """
    wanted = conditions(SPARE, (5, 3))[: 1 if run.tiny else None]

    def plan(subject: Subject) -> list[Job]:
        preset = None if subject is RESNET18 else "imagenet-vit"
        variants = [published(find(name)) for name in ("frozen", "source-gda")]
        variants.append(Variant("tent", "tent", preset))
        for share in THRESHOLDS:
            gate = (("agreement", share),)
            variants.append(Variant(f"tent+referee {share}", "tent+referee", preset, gate))
        return [Job(subject.name, condition, tuple(variants)) for condition in wanted]

    carry_out(run, "referee", NETWORKS, plan, workers, seconds)
