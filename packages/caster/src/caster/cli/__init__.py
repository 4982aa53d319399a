"""The `caster` command: one file a group of commands; each parses, makes one call and prints."""

from caster.cli.app import main

__all__ = ["main"]
