"""Ctrl-C between two steps: the first is noticed there, so that nothing is left half done.

An exception raised at any instruction can also be lost: code that calls back from C may print and forget it.
"""

from __future__ import annotations

import signal
from types import FrameType, TracebackType


class Interrupts:
    """While it is entered, the first Ctrl-C is remembered instead of raised. The second one is raised at once.

    Use it in the main thread only: Python delivers signals there.
    """

    def __init__(self) -> None:
        self._came = False

    def __enter__(self) -> Interrupts:
        self._before = signal.signal(signal.SIGINT, self._remember)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.signal(signal.SIGINT, self._before)

    @property
    def came(self) -> bool:
        """Whether a Ctrl-C came. Look where everything can be given back."""
        return self._came

    def check(self) -> None:
        """Raise KeyboardInterrupt if a Ctrl-C came: for places where leaving gives everything back."""
        if self._came:
            raise KeyboardInterrupt

    def _remember(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        if self._came:
            raise KeyboardInterrupt
        self._came = True
