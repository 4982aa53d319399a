"""Sweeps: which cells there are to run, as a TOML file names them."""

from caster.sweeps.parse import read
from caster.sweeps.part import chosen, part_of, without
from caster.sweeps.spec import STUDIES, Backbone, Data, Spec, Sweep

__all__ = ["STUDIES", "Backbone", "Data", "Spec", "Sweep", "chosen", "part_of", "read", "without"]
