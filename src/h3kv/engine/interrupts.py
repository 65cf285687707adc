"""Ctrl-C that waits until bookkeeping is whole again."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator


class _Deferral:
    """Whether a block is running that defers Ctrl-C, and whether one came. Only the main thread ever changes it."""

    def __init__(self) -> None:
        self.is_active = False
        self.came = False

    def note(self, *_: object) -> None:
        self.came = True


_DEFERRAL = _Deferral()


@contextlib.contextmanager
def interrupts_deferred() -> Iterator[None]:
    """Raise the KeyboardInterrupt of a Ctrl-C when the block ends, not inside it.

    Outside the main thread, and where the program handles the signal itself, nothing is changed: no KeyboardInterrupt
    comes there. Blocks may lie inside each other; the outermost one counts, and the others cost nothing.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or _DEFERRAL.is_active or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    _DEFERRAL.came = False
    signal.signal(signal.SIGINT, _DEFERRAL.note)
    _DEFERRAL.is_active = True
    try:
        yield
    finally:
        _DEFERRAL.is_active = False
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if _DEFERRAL.came:
        raise KeyboardInterrupt


def check_interrupt() -> None:
    """For long waits inside a block that defers: raise the KeyboardInterrupt now, if one came."""
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and _DEFERRAL.is_active and _DEFERRAL.came:
        _DEFERRAL.came = False
        raise KeyboardInterrupt
