"""Errors for model files that the system does not let us read."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from h3kv.core.errors import HostMemoryError, ModelNotFoundError
from h3kv.models.host_memory import CURE, is_out_of_memory


@contextlib.contextmanager
def file_errors(path: Path) -> Iterator[None]:
    """Turn what the system refuses while the context lasts into an error that names the file and the cure.

    Args:
        path: the folder or file that is read; the message names the very file where the system does.

    Raises:
        ModelNotFoundError: something there cannot be read.
        HostMemoryError: no memory is left to map or hold it.
    """
    try:
        yield
    except (OSError, MemoryError, RuntimeError) as error:
        if is_out_of_memory(error):
            message = f"out of memory while {path} is opened; {CURE}"
            raise HostMemoryError(message, needed_bytes=None, available_bytes=None) from error
        if not isinstance(error, OSError):
            raise
        named, reason = error.filename or path, error.strerror or error
        raise ModelNotFoundError(
            f"{named} cannot be read ({reason}); make it a file that this user may read, or give another path",
            path=str(named),
        ) from error
