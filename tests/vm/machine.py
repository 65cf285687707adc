"""What the tests of the virtual machine share: its NVMe disk, and whether they run there at all."""

from __future__ import annotations

from pathlib import Path

import pytest

DEVICE = Path("/dev/nvme0n1")
FACTS = Path("/sys/block/nvme0n1")
SERIAL = "h3test"
"""The virtual disk's. On any other disk nothing here runs."""


def is_test_disk() -> bool:
    serial = FACTS / "device/serial"
    return serial.exists() and serial.read_text().strip() == SERIAL


def sectors_read() -> int:
    return int((FACTS / "stat").read_text().split()[2])


in_machine_only = [
    pytest.mark.vm,
    pytest.mark.skipif(not is_test_disk(), reason="needs the virtual test machine: make test-vm VM=FOLDER"),
]
