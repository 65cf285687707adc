"""The folder of sockets of a running node, and what lies in it about its processes.

~h3 (0700)   nvme_io.sock  gpu_worker.sock  ...  node.json   what `h3 status` and `h3 monitor` read
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import stat
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from h3kv.core.errors import AddressInUseError, ConfigError, PeerUnavailableError

FACTS: Final = "node.json"
LOCK: Final = "up.lock"
MODE: Final = 0o700


@dataclass(frozen=True, slots=True)
class ProcessFacts:
    """Where a process of the node can be asked."""

    name: str
    address: str | None
    """Of its gRPC service, or of HTTP for the gateway."""
    metrics_url: str | None


def default_folder() -> Path:
    """One for each user of the machine."""
    return Path(tempfile.gettempdir()) / f"h3-{os.getuid()}"


def make_folder(path: Path) -> None:
    """Make the folder, or take it as it is when it is this user's alone.

    Raises:
        ConfigError: someone else could open sockets in it, or it cannot be made.
    """
    try:
        path.mkdir(mode=MODE, parents=True, exist_ok=True)
        found = path.lstat()
    except OSError as error:
        message = f"{path} cannot be made ({error.strerror}): name another with --run-folder"
        raise ConfigError(message, field="run_folder") from error
    is_own = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
    if not is_own or stat.S_IMODE(found.st_mode) & ~MODE:
        raise ConfigError(
            f"{path} is open to others, or theirs: `chmod 700` it, or name another with --run-folder",
            field="run_folder",
        )


@contextlib.contextmanager
def held_folder(path: Path) -> Iterator[None]:
    """Nobody else runs a node in this folder meanwhile.

    Raises:
        AddressInUseError: someone does.
    """
    with (path / LOCK).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            message = f"a node runs in {path} already: end it, or name another folder with --run-folder"
            raise AddressInUseError(message, address=str(path)) from error
        yield


def write_facts(path: Path, processes: list[ProcessFacts]) -> None:
    """Say where the processes can be asked. Readers see the old file or the new one, never a part."""
    fresh = path / f"{FACTS}.new"
    fresh.write_text(json.dumps({"processes": [asdict(each) for each in processes]}), encoding="utf-8")
    fresh.replace(path / FACTS)


def remove_facts(path: Path) -> None:
    """The node is gone."""
    (path / FACTS).unlink(missing_ok=True)


def read_facts(path: Path) -> list[ProcessFacts]:
    """What runs here.

    Raises:
        PeerUnavailableError: nothing does.
        ConfigError: the file is none of ours.
    """
    try:
        text = (path / FACTS).read_text(encoding="utf-8")
    except FileNotFoundError as error:
        message = f"no node runs with {path}: start one with `h3 up`, or name its folder with --run-folder"
        raise PeerUnavailableError(message, peer=str(path)) from error
    try:
        return [ProcessFacts(**each) for each in json.loads(text)["processes"]]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path / FACTS} is damaged ({error}): remove it", field="run_folder") from error
