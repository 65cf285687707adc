"""Progress on stderr: a moving bar on a terminal, one plain line for each stage anywhere else."""

from __future__ import annotations

from types import TracebackType
from typing import Final

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

STEPS: Final = 4
"""Numbers in the plain line of a stage: one for every quarter."""


class StageProgress:
    """One stage after another, each with an amount that is done and a total.

    Use it as a context manager: leaving it removes the bar.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar: Progress | None = None
        self._line: str | None = None
        """Stage whose plain line has not ended."""
        self._step = -1

    def __enter__(self) -> StageProgress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def begin(self, stage: str) -> None:
        """Start a stage; the one before it has ended."""
        self.end()
        if not self._console.is_terminal:
            self._line, self._step = stage, -1
            self._put(f"{stage}:")
        else:
            columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f} %"))
            self._bar = Progress(*columns, TimeElapsedColumn(), console=self._console, transient=True)
            self._bar.add_task(stage, total=None)
            self._bar.start()

    def end(self) -> None:
        """Take the bar away. Text may follow: a bar that still moved would wipe it out."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
        if self._line is not None:
            self._line = None
            self._put("\n")

    def update(self, done: int, total: int) -> None:
        """Say how much of the stage is done."""
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=done, total=total)
        step = STEPS * done // total if total else STEPS
        if self._line is not None and step != self._step:
            self._step = step
            self._put(f" {100 * done // total if total else 100} %")

    def say(self, line: str) -> None:
        """Write one line that stays. The stage's plain line ends before it."""
        if self._line is not None:
            self.end()
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)

    def _put(self, text: str) -> None:
        self._console.print(text, end="", highlight=False, markup=False, soft_wrap=True)
