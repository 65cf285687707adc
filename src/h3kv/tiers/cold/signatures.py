"""What else may lie on a device: file systems, partition tables, members of volumes and arrays."""

from __future__ import annotations

import os
import shutil
import subprocess
from typing import Final

from h3kv.tiers.cold.ops import aligned_memory

_HEAD_BYTES: Final = 1 << 20
_TAIL_BYTES: Final = 1 << 20
"""Every signature below lies within so much of the start or the end."""

_BLKID_TIMEOUT_S: Final = 10

_AT_START: Final = (
    ("a GPT partition table", 512, b"EFI PART"),
    ("a GPT partition table", 4096, b"EFI PART"),
    ("XFS", 0, b"XFSB"),
    ("ext2, ext3 or ext4", 1080, b"\x53\xef"),
    ("Btrfs", 65600, b"_BHRfS_M"),
    ("swap", 4086, b"SWAPSPACE2"),
    ("swap", 4086, b"SWAP-SPACE"),
    ("swap", 65526, b"SWAPSPACE2"),
    ("LUKS", 0, b"LUKS\xba\xbe"),
    ("LUKS", 16384, b"SKUL\xba\xbe"),
    ("a member of an MD array", 0, b"\xfc\x4e\x2b\xa9"),
    ("a member of an MD array", 4096, b"\xfc\x4e\x2b\xa9"),
    ("LVM", 0, b"LABELONE"),
    ("LVM", 512, b"LABELONE"),
    ("LVM", 1024, b"LABELONE"),
    ("LVM", 1536, b"LABELONE"),
    ("NTFS", 3, b"NTFS    "),
    ("exFAT", 3, b"EXFAT   "),
    ("FAT", 54, b"FAT1"),
    ("FAT", 82, b"FAT32"),
    ("F2FS", 1024, b"\x10\x20\xf5\xf2"),
    ("bcache", 4120, bytes.fromhex("c68573f64e1a45ca8265f57f48ba6d81")),
    ("bcachefs", 4120, bytes.fromhex("c68573f666ce90a9d96a60cf803df7ef")),
    ("ReiserFS", 65588, b"ReIsEr"),
    ("JFS", 32768, b"JFS1"),
    ("HFS+", 1024, b"H+"),
    ("HFS+", 1024, b"HX"),
    ("ISO 9660", 32769, b"CD001"),
    ("UDF", 32769, b"BEA01"),
    ("SquashFS", 0, b"hsqs"),
    ("Ceph BlueStore", 0, b"bluestore block device"),
    # Last: boot sectors of file systems end in it too, and their own names say more.
    ("an MBR partition table or a boot sector", 510, b"\x55\xaa"),
)

_FROM_END: Final = (
    ("the copy of a GPT partition table", 512, b"EFI PART"),
    ("the copy of a GPT partition table", 4096, b"EFI PART"),
)

_ZFS_UBERBLOCKS: Final = range(128 << 10, 256 << 10, 1 << 10)
_ZFS_MAGICS: Final = (b"\x0c\xb1\xba\x00\x00\x00\x00\x00", b"\x00\x00\x00\x00\x00\xba\xb1\x0c")
_MD_MAGIC: Final = b"\xfc\x4e\x2b\xa9"


def find_signature(file: int, size_bytes: int, *, path: str) -> str | None:
    """Name of what lies on a device or file, None if nothing is recognised.

    Args:
        file: open descriptor.
        size_bytes: of the device.
        path: of the device, for `blkid`, which knows more and is asked too where it is installed.

    Raises:
        OSError: reading failed.
    """
    head = _read(file, 0, min(_HEAD_BYTES, size_bytes))
    tail = _read(file, max(0, size_bytes - _TAIL_BYTES), min(_TAIL_BYTES, size_bytes))
    found = [name for name, offset, magic in _AT_START if head[offset : offset + len(magic)] == magic]
    found += [name for name, back, magic in _FROM_END if tail[len(tail) - back :].startswith(magic)]
    if any(head[at : at + 8] in _ZFS_MAGICS for at in _ZFS_UBERBLOCKS):
        found.append("ZFS")
    if any(_at_end(tail, size_bytes, offset).startswith(_MD_MAGIC) for offset in _md_offsets(size_bytes)):
        found.append("a member of an MD array")
    return found[0] if found else _ask_blkid(path)


def _md_offsets(size_bytes: int) -> tuple[int, int]:
    """Where formats 0.90 and 1.0 of MD keep their superblock: by whole 64 KiB and 4 KiB from the end."""
    return (size_bytes // 65536 - 1) * 65536, (size_bytes - 8192) // 4096 * 4096


def _at_end(tail: bytes, size_bytes: int, offset: int) -> bytes:
    start = offset - (size_bytes - len(tail))
    return tail[start : start + len(_MD_MAGIC)] if start >= 0 else b""


def _read(file: int, offset: int, size: int) -> bytes:
    if size == 0:
        return b""
    memory = aligned_memory(size)
    done = os.preadv(file, [memory], offset)
    return memory[: min(done, size)]


def _ask_blkid(path: str) -> str | None:
    """What util-linux's own probe calls it. Where it is missing or fails, our list has to do."""
    program = shutil.which("blkid", path=f"{os.defpath}:/usr/sbin:/sbin")
    if program is None:
        return None
    command = [program, "--probe", "--output", "value", "--match-tag", "TYPE", "--match-tag", "PTTYPE", path]
    try:
        # S603: the program is util-linux's, and the path comes as one argument.
        answer = subprocess.run(  # noqa: S603
            command, capture_output=True, text=True, timeout=_BLKID_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return ", ".join(answer.stdout.split()) or None
