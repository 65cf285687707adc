"""How a command ends: exit codes, and one clear line for an error."""

from __future__ import annotations

import contextlib
import sys
import traceback
from collections.abc import Iterator, Mapping
from typing import Final, NoReturn

import typer

from h3kv.core.errors import H3Error

ERROR: Final = 1
INTERRUPTED: Final = 130
"""128 + SIGINT, as shells report it."""

FLAG_OF: Final = {
    "model.source": "--model",
    "model.dtype": "--dtype",
    "model.max_context": "--max-context",
    "model.rope_scaling": "--rope",
    "device.kv_bytes": "--device-kv",
    "device.window_tokens": "--window",
    "host.kv_bytes": "--host-kv",
    "nvme.store": "--store",
    "nvme.capacity": "--store-capacity",
    "tiering.mode": "--tiering",
    "engine.max_new_tokens": "--max-new-tokens",
    "runtime.threads": "--threads",
}
"""Settings that have a flag, so that a message about one can name the other."""

FORMAT_FLAG_OF: Final = {"nvme.capacity": "--capacity"}
"""The same of `h3 format`."""


@contextlib.contextmanager
def exits(flag_of: Mapping[str, str] = FLAG_OF) -> Iterator[None]:
    """Turn what a command raises into an exit code and a line on stderr.

    Args:
        flag_of: the command's flags, by the settings that they set.
    """
    try:
        yield
    except KeyboardInterrupt as error:
        _end("interrupted", INTERRUPTED, error)
    except H3Error as error:
        _end(f"error: {_with_flags(str(error), flag_of)}", ERROR, error)
    except (typer.Exit, typer.Abort, BrokenPipeError):
        # typer ends the process for these. In a broken pipe the reader has left: there is no one to explain it to.
        raise
    except MemoryError as error:
        _end(
            "error: out of memory: free some, or choose a smaller dtype, model, --device-kv or --host-kv", ERROR, error
        )
    except Exception as error:  # noqa: BLE001  (the last line of defence of a command)
        _end(f"error: unexpected {type(error).__name__}: {error} (H3_DEBUG=1 shows where)", ERROR, error)


def _with_flags(message: str, flag_of: Mapping[str, str]) -> str:
    """The message, and the flags of the settings that it names."""
    named = [
        f"{flag} sets {setting}" for setting, flag in flag_of.items() if setting in message and flag not in message
    ]
    return f"{message} ({', '.join(named)})" if named else message


def _end(line: str, code: int, error: BaseException) -> NoReturn:
    from h3kv.config import debug_wanted

    if debug_wanted():
        traceback.print_exception(error)
    sys.stderr.write(f"{' '.join(line.split())}\n")
    raise typer.Exit(code) from None
