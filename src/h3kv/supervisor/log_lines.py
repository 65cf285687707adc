"""What children write, line by line, with the child's name before it."""

from __future__ import annotations

import threading
from typing import IO, Final

LINE_BYTES_MAX: Final = 16 << 10
"""Longer lines are cut in pieces."""


class LineSink:
    """Where lines of all children go. Thread-safe: lines never mix.

    Args:
        output: such as stderr.
        width: of the column with names.
    """

    def __init__(self, output: IO[str], *, width: int) -> None:
        self._output = output
        self._width = width
        self._lock = threading.Lock()

    def write(self, name: str, line: str) -> None:
        """One line. A reader that left is no reason to stop."""
        with self._lock:
            try:
                self._output.write(f"{name:<{self._width}} | {line}\n")
                self._output.flush()
            except (OSError, ValueError):
                return


class LinePump:
    """Copies a pipe to a sink until it is closed, on a thread of its own.

    Args:
        name: of the child.
        pipe: read and closed.
        sink: receives lines.
    """

    def __init__(self, name: str, pipe: IO[bytes], sink: LineSink) -> None:
        self._name = name
        self._pipe = pipe
        self._sink = sink
        self._thread = threading.Thread(target=self._run, name=f"log-{name}", daemon=True)
        self._thread.start()

    def join(self, timeout_s: float) -> None:
        """Wait for the last line. A grandchild may hold the pipe open: that is not waited for."""
        self._thread.join(timeout_s)

    def _run(self) -> None:
        with self._pipe:
            while line := self._pipe.readline(LINE_BYTES_MAX):
                self._sink.write(self._name, line.decode(errors="replace").rstrip("\r\n"))
