"""Whether a block device may be given to a cold store: nothing that is in use or may hold somebody's data."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from h3kv.core.errors import StoreError, StoreFormatError
from h3kv.tiers.cold.place import OpenPlace
from h3kv.tiers.cold.signatures import find_signature


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """What the kernel says about a block device."""

    name: str
    """As in /sys/class/block."""
    size_bytes: int
    serial: str | None
    is_read_only: bool
    mounts: tuple[str, ...]
    """Where it or one of its partitions is mounted, `swap` included."""
    partitions: tuple[str, ...]
    holders: tuple[str, ...]
    """Devices built on it: LVM, LUKS, arrays."""


def inspect(place: OpenPlace) -> DeviceFacts:
    """The facts about an open block device."""
    node = Path(f"/sys/dev/block/{_number(os.fstat(place.file).st_rdev)}").resolve()
    partitions = sorted(path.parent for path in node.glob("*/partition"))
    members = [node, *partitions]
    return DeviceFacts(
        name=node.name,
        size_bytes=place.size_bytes,
        serial=_serial(node),
        is_read_only=_text(node / "ro") == "1",
        mounts=tuple(where for member in members for where in _mounts(_text(member / "dev") or "", member.name)),
        partitions=tuple(path.name for path in partitions),
        holders=tuple(sorted(path.name for member in members for path in member.glob("holders/*"))),
    )


def check_device(place: OpenPlace, facts: DeviceFacts, *, is_ours: bool) -> None:
    """Refuse a device that is in use or that something else lies on.

    Args:
        place: the open device.
        facts: about it.
        is_ours: whether it is a cold store already.

    Raises:
        StoreError: it is mounted, partitioned, held or read-only.
        StoreFormatError: a signature was found on it.
    """
    path = str(place.path)
    if facts.mounts:
        raise StoreError(
            f"{path} is in use at {', '.join(facts.mounts)}: unmount it, or name another device", path=path
        )
    if facts.holders:
        raise StoreError(f"{path} carries {', '.join(facts.holders)}: name another device", path=path)
    if facts.partitions:
        raise StoreError(
            f"{path} has partitions ({', '.join(facts.partitions)}): name one of them, or another device", path=path
        )
    if facts.is_read_only:
        raise StoreError(f"{path} is read-only: name another device", path=path)
    found = None if is_ours else find_signature(place.file, facts.size_bytes, path=path)
    if found is not None:
        raise StoreFormatError(
            f"{path} holds {found}, and nothing on it is overwritten: name another device, or clear it yourself with "
            f"`wipefs --all {path}` if nobody needs it",
            path=path,
        )


def _number(device: int) -> str:
    return f"{os.major(device)}:{os.minor(device)}"


def _mounts(number: str, name: str) -> list[str]:
    """Where a device is mounted in this mount namespace, and whether it is swapped to."""
    lines = [line.split() for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines()]
    # Field 3 is the device's number; Btrfs and others show a number of their own there, and the device in field -2.
    found = [line[4] for line in lines if line[2] == number or Path(line[line.index("-") + 2]).name == name]
    swaps = (_text(Path("/proc/swaps")) or "").splitlines()[1:]
    return found + ["swap" for line in swaps if Path(line.split()[0]).name == name]


def _serial(node: Path) -> str | None:
    candidates = (node / "device/serial", node / "../device/serial", node / "serial", node / "wwid")
    return next((text for path in candidates if (text := _text(path))), None)


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None
