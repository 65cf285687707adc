"""Containers that forbid io_uring, and a memlock limit of 64 KiB: declared fallbacks that work."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

COMMON = """
import ctypes, json, os, resource, sys
from pathlib import Path
from h3kv.core.errors import ConfigError
from h3kv.testing.io_file import IoFile, run
from h3kv.tiers.io import FLUSH, READ, WRITE, IoEngine

file = IoFile(Path(sys.argv[1]), 1 << 20)

def works(engine):
    ends = run(engine, file.op(WRITE, 0, 65536), file.op(READ, 65536, 65536))["status"].tolist()
    ends += run(engine, file.op(FLUSH))["status"].tolist()
    engine.close()
    return ends == [0, 0, 0] and bytes(file.read_N[65536:131072]) == bytes(file.bytes_N[65536:131072])
"""

FORBID = """
class Instruction(ctypes.Structure):
    _fields_ = [("code", ctypes.c_ushort), ("yes", ctypes.c_ubyte), ("no", ctypes.c_ubyte), ("k", ctypes.c_uint)]

class Program(ctypes.Structure):
    _fields_ = [("size", ctypes.c_ushort), ("first", ctypes.POINTER(Instruction))]

IO_URING_SETUP, ALLOW, DENY = 425, 0x7FFF0000, 0x00050000 | int(sys.argv[2])
program = (Instruction * 4)(
    Instruction(0x20, 0, 0, 0),               # load the number of the call
    Instruction(0x15, 0, 1, IO_URING_SETUP),  # another call: skip one
    Instruction(0x06, 0, 0, DENY),
    Instruction(0x06, 0, 0, ALLOW),
)
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(38, 1, 0, 0, 0) == 0  # no new privileges
if libc.prctl(22, 2, ctypes.byref(Program(4, program)), 0, 0) != 0:  # filter system calls
    sys.exit(77)
try:
    IoEngine.open([file.descriptor], depth=4, backend="io_uring")
    refusal = ""
except ConfigError as error:
    refusal = str(error)
engine = IoEngine.open([file.descriptor], depth=4, buffers=[file.buffer])
print(json.dumps([engine.backend, engine.fallback_reason, engine.fixed_buffers, works(engine), refusal]))
"""

LIMIT = """
resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))
if os.getuid() == 0:
    os.setgid(65534)
    os.setuid(65534)  # root may lock what it wants
engine = IoEngine.open([file.descriptor], depth=4, buffers=[file.buffer])
print(json.dumps([engine.backend, engine.fixed_buffers, engine.buffers_reason, works(engine)]))
"""

NO_THREADS = """
from h3kv.core.errors import TierBrokenError
if os.getuid() == 0:
    os.setgid(65534)
    os.setuid(65534)  # root may start what it wants
allowed = len(os.listdir("/proc/self/task")) + int(sys.argv[2])
resource.setrlimit(resource.RLIMIT_NPROC, (allowed, allowed))
try:
    engine = IoEngine.open([file.descriptor], depth=4, backend=sys.argv[3])
    print(json.dumps([works(engine)]))
except TierBrokenError as error:
    print(json.dumps([str(error)]))
"""


def child(script: str, *arguments: str) -> list[object]:
    done = subprocess.run(
        [sys.executable, "-c", COMMON + script, *arguments], check=False, capture_output=True, text=True, timeout=120
    )
    if done.returncode == 77:
        pytest.skip("this kernel has no seccomp filters")
    assert done.returncode == 0, done.stderr
    answer: list[object] = json.loads(done.stdout)
    return answer


@pytest.mark.slow
@pytest.mark.parametrize(("error", "text"), [(1, "Operation not permitted"), (38, "Function not implemented")])
def test_threads_take_over_where_io_uring_is_refused(tmp_path: Path, error: int, text: str) -> None:
    backend, reason, is_fixed, works, refusal = child(FORBID, str(tmp_path / "file"), str(error))
    assert (backend, is_fixed, works) == ("threads", False, True)
    assert reason == f"io_uring_setup: {text}"
    assert refusal == f"io_uring is not available here ({reason}); choose the backend auto or threads"


@pytest.mark.slow
def test_a_memlock_limit_of_64_kib_leaves_buffers_unregistered_and_says_so(tmp_path: Path) -> None:
    backend, is_fixed, reason, works = child(LIMIT, str(tmp_path / "file"))
    assert works
    if backend == "io_uring":
        assert not is_fixed
        assert isinstance(reason, str)
        assert reason.startswith("registering buffers: Cannot allocate memory")
        assert "memlock limit is 64.0 KiB" in reason
    else:
        assert not is_fixed


@pytest.mark.slow
@pytest.mark.parametrize(("allowed", "backend"), [(0, "auto"), (0, "io_uring"), (1, "threads"), (3, "threads")])
def test_threads_that_cannot_be_started_are_an_error_that_names_the_limit(
    tmp_path: Path, allowed: int, backend: str
) -> None:
    (answer,) = child(NO_THREADS, str(tmp_path / "file"), str(allowed), backend)
    assert isinstance(answer, str)
    assert "cannot start its threads (Resource temporarily unavailable)" in answer
    assert "ulimit -u" in answer
