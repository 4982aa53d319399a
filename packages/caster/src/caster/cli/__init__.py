"""The `caster` command: each command parses its options, makes one call and prints the result."""


def main() -> None:
    """Run the command line."""
    from caster.cli.app import main as run  # not above: plugins import modules of this package

    run()
