"""Who may still write is known from locks, whoever made the file and however its holders end."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from h3kv.attention.helper_locks import HelperLocks
from h3kv.core.errors import StoreError

HOLDER = """
import sys
from pathlib import Path
from h3kv.attention.helper_locks import HelperLocks
locks = HelperLocks(Path(sys.argv[1]))
locks.hold([7])
print("held", flush=True)
sys.stdin.read()
"""


def test_numbers_below_are_those_of_earlier_owners(tmp_path: Path) -> None:
    owner = HelperLocks(tmp_path / "crew", mode=0o600)
    helper = HelperLocks(tmp_path / "crew")
    helper.hold([5, 6])
    assert not owner.are_held(below=5)
    assert owner.are_held(below=6)
    # Another helper may say the same of itself, in a region that was made anew.
    other = HelperLocks(tmp_path / "crew")
    other.hold([5])
    helper.close()
    assert owner.are_held(below=6)
    other.close()
    other.close()
    assert not owner.are_held(below=1 << 20)
    owner.close()


def test_a_lock_ends_with_its_process_and_not_while_that_is_stopped(tmp_path: Path) -> None:
    owner = HelperLocks(tmp_path / "crew", mode=0o660)
    command = [sys.executable, "-c", HOLDER, str(tmp_path / "crew")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"held\n"
        process.send_signal(signal.SIGSTOP)
        assert owner.are_held(below=8)
        process.kill()
    assert not owner.are_held(below=8)
    owner.close()


def test_the_file_has_the_mode_of_the_socket_and_must_be_reachable(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="No such file"):
        HelperLocks(tmp_path / "crew")
    owner = HelperLocks(tmp_path / "crew", mode=0o660)
    assert owner.path.stat().st_mode & 0o777 == 0o660
    owner.close()
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match="make its folder"):
        HelperLocks(tmp_path / "file" / "crew", mode=0o600)
