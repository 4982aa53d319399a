"""The benchmark's networks for small images: six backbones, and a small one of each family.

Beside them stand two that have published ImageNet weights."""

from caster_bench.engine.networks.catalogue import SIZES, Architecture, architectures, build, find

__all__ = ["SIZES", "Architecture", "architectures", "build", "find"]
