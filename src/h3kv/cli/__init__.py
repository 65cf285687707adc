"""The command `h3`."""

import sys

__all__ = ["main", "monitor", "server"]


def main() -> None:
    """Run the command line. Ends the process with 0, 1 (an error), 2 (wrong usage) or 130 (interrupted)."""
    _run("h3", [])


def server() -> None:
    """`h3_server`: `h3 up` under the name that it has as a program of its own."""
    _run("h3_server", ["up"])


def monitor() -> None:
    """`h3_monitor`: `h3 monitor` under the name that it has as a program of its own."""
    _run("h3_monitor", ["monitor"])


def _run(name: str, command: list[str]) -> None:
    try:
        # Heavy modules are imported by the command that needs them, so that `h3 --help` answers at once.
        from h3kv.cli.app import app

        app(args=[*command, *sys.argv[1:]], prog_name=name)
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        sys.exit(130)
