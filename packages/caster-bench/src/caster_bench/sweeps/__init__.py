"""Sweeps: the cells to run, as a TOML file lists them."""

from caster_bench.sweeps.parse import read
from caster_bench.sweeps.spec import STUDIES, Backbone, Data, Spec, Sweep, part_of, select, without

__all__ = ["STUDIES", "Backbone", "Data", "Spec", "Sweep", "part_of", "read", "select", "without"]
