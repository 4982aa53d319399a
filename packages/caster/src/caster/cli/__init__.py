"""The `caster` command: one file a group of commands; each parses, makes one call and prints."""


def main() -> None:
    """Run the command line."""
    from caster.cli.app import main as run  # not above: plugins import modules of this package

    run()
