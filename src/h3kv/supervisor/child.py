"""One process of the node, from its start to its end."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from h3kv.supervisor import launch
from h3kv.supervisor.log_lines import LinePump, LineSink

LAST_LINES_S: Final = 0.5
"""For a child's last lines to come."""


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """How one process is run."""

    name: str
    """Unique in the node: `ann_offload-1`."""
    command: tuple[str, ...]
    """Program with its absolute path, and arguments."""
    stage: int
    """Started after all of the stages below serve, and ended before those."""
    is_serving: Callable[[], bool]
    """Whether it serves now. Takes a second at most."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Besides that of this process."""
    folder: Path | None = None
    """Where it runs; None: here."""
    address: str | None = None
    """Where it serves, for people and for `h3 status`."""
    metrics_url: str | None = None


class Child:
    """A process that was started. It dies with the thread that made it: make it in the main thread.

    Its signals are ours to send: a terminal's Ctrl-C does not reach it.
    """

    def __init__(self, spec: ChildSpec, sink: LineSink) -> None:
        self.spec = spec
        settings = [f"{name}={value}" for name, value in spec.environment.items()]
        self._process = subprocess.Popen(  # noqa: S603  (the command is this package's own)
            launch.tied(spec.command, settings),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=spec.folder,
            start_new_session=True,
        )
        assert self._process.stdout is not None
        self._lines = LinePump(spec.name, self._process.stdout, sink)

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    def exit_code(self) -> int | None:
        """How it ended: negative by a signal; None while it lives."""
        return self._process.poll()

    def ask_to_end(self) -> None:
        """SIGTERM."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL, to it and to what it started, and wait for its end."""
        self._signal(signal.SIGKILL)
        self._process.wait()

    def collect(self) -> None:
        """After its end: let its last lines come."""
        self._lines.join(LAST_LINES_S)

    def _signal(self, number: signal.Signals) -> None:
        # It leads its own group. Its number is taken until `poll` or `wait` has seen its end.
        if self._process.poll() is None:
            os.killpg(self._process.pid, number)
