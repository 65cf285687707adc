"""Whether a process serves now."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from h3kv.supervisor import probe

PATIENCE_S: Final = 0.25
"""For an answer. One that comes later comes at the next look."""


def health_of(address: str) -> Callable[[], bool]:
    """Asks at an address: `unix:///run/h3/nvme_io.sock`, or `http://127.0.0.1:8000/health`."""

    def is_serving() -> bool:
        return probe.is_serving(address, timeout_s=PATIENCE_S)

    return is_serving
