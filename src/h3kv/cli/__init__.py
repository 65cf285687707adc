"""The command `h3`."""

import sys

__all__ = ["main"]


def main() -> None:
    """Run the command line. Ends the process with 0, 1 (an error), 2 (wrong usage) or 130 (interrupted)."""
    try:
        # Heavy modules are imported by the command that needs them, so that `h3 --help` answers at once.
        from h3kv.cli.app import app

        app(prog_name="h3")
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        sys.exit(130)
