"""Sweeps: which cells there are to run, as a TOML file names them."""

from caster_bench.sweeps.parse import read
from caster_bench.sweeps.part import chosen, part_of, without
from caster_bench.sweeps.spec import STUDIES, Backbone, Data, Spec, Sweep

__all__ = ["STUDIES", "Backbone", "Data", "Spec", "Sweep", "chosen", "part_of", "read", "without"]
