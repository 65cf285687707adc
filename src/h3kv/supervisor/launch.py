"""What a child runs before its program: it ties its life to its parent's, then becomes the program.

    python launch.py PARENT [NAME=VALUE ...] -- PROGRAM [ARGUMENT ...]

Run by path, in an interpreter without site packages: it imports nothing of ours.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Iterable, Sequence

PR_SET_PDEATHSIG = 1
LATE = 3
"""Exit code where the parent was gone already."""


def tied(program: Sequence[str], settings: Iterable[str] = ()) -> list[str]:
    """The command of a program that ends with the thread of this process that starts it, however that ends.

    Args:
        program: its path and its arguments.
        settings: NAME=VALUE, of its environment besides ours.
    """
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), *settings, "--", *program]


def tie(parent: int) -> None:
    """End this process with the thread that started it, of the process of this number."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl: {os.strerror(number)}")
    # A parent that died before the line above is noticed by nobody else.
    if os.getppid() != parent:
        sys.exit(LATE)


def main(arguments: list[str]) -> None:
    """Become the program."""
    at = arguments.index("--")
    parent, settings, program = int(arguments[0]), arguments[1:at], arguments[at + 1 :]
    tie(parent)
    for setting in settings:
        name, _, value = setting.partition("=")
        # The program sees it: `execv` passes on what `putenv` set.
        os.putenv(name, value)
    os.execv(program[0], program)  # noqa: S606  (the supervisor wrote the command)


if __name__ == "__main__":
    main(sys.argv[1:])
