"""A Ctrl-C before a chosen line of chosen modules: for "interrupt at the n-th line, n = 1, 2, ..., until none came"."""

from __future__ import annotations

import signal
import sys
from collections.abc import Collection
from types import FrameType, TracebackType
from typing import Any


class InterruptAt:
    """While it is entered, the n-th line that the modules run is preceded by a SIGINT.

    In the main thread, and in code that it calls from there on. Nobody else may trace meanwhile.

    Args:
        line: n, counted from 1 over all modules.
        modules: names of them.
    """

    def __init__(self, line: int, modules: Collection[str]) -> None:
        self._left = line
        self._modules = frozenset(modules)

    @property
    def came(self) -> bool:
        """Whether so many lines were run."""
        return self._left <= 0

    def __enter__(self) -> InterruptAt:
        sys.settrace(self._enter_frame)
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        sys.settrace(None)

    def _enter_frame(self, frame: FrameType, _event: str, _argument: Any) -> Any:
        return self._enter_line if frame.f_globals.get("__name__") in self._modules else None

    def _enter_line(self, _frame: FrameType, event: str, _argument: Any) -> Any:
        if event == "line":
            self._left -= 1
            if self._left == 0:
                # What the handler raises is raised where the line is.
                signal.raise_signal(signal.SIGINT)
        return self._enter_line
