"""What open descriptors are called in messages."""

from __future__ import annotations

import contextlib
from pathlib import Path


def name_of(fd: int) -> str:
    """The name that the kernel has for a descriptor, or its number."""
    with contextlib.suppress(OSError):
        return str(Path(f"/proc/self/fd/{fd}").readlink())
    return f"descriptor {fd}"
