"""``python -m caster``."""

from caster.cli import main

main()
