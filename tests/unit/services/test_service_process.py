import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import h3kv
from h3kv.core.errors import (
    AddressInUseError,
    ConfigError,
    H3Error,
    ModelNotFoundError,
    PeerTimeoutError,
    RegionError,
    StoreBusyError,
    StoreFormatError,
)
from h3kv.service_process import FAILED, REFUSED, exit_code

PROGRAM = """
import sys
from h3kv.core.errors import ConfigError
from h3kv.service_process import StopSignal, run_process

def serve():
    stop = StopSignal()
    how = sys.argv[1]
    if how == "refuse":
        raise ConfigError("address is wrong: name another", field="address")
    if how == "break":
        stop.stop(ZeroDivisionError("broken"))
        stop.stop()
        stop.wait()
        raise stop.failure
    print("ready", flush=True)
    stop.wait()
    stop.check()

run_process(serve)
"""


def start(*arguments: str, flags: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *flags, "-c", PROGRAM, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(h3kv.__file__).parents[1])},
    )


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_process_that_is_told_to_end_ends_well(number: signal.Signals) -> None:
    with start("serve") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        assert process.wait(timeout=30) == 0


@pytest.mark.slow
def test_refused_start_says_why_on_one_line() -> None:
    _, error = (process := start("refuse")).communicate(timeout=30)
    assert (process.returncode, error) == (REFUSED, "error: address is wrong: name another\n")


@pytest.mark.slow
def test_process_that_broke_ends_with_what_broke() -> None:
    _, error = (process := start("break")).communicate(timeout=30)
    assert process.returncode == FAILED
    assert "ZeroDivisionError: broken" in error


@pytest.mark.slow
def test_process_without_assertions_is_refused() -> None:
    _, error = (process := start("serve", flags=("-O",))).communicate(timeout=30)
    assert process.returncode == REFUSED
    assert "without -O" in error


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("x", field="x"), REFUSED),
        (ModelNotFoundError("x", path="x"), REFUSED),
        (StoreFormatError("x", path="x"), REFUSED),
        (StoreBusyError("x", path="x"), FAILED),
        (AddressInUseError("x", address="x"), FAILED),
        (PeerTimeoutError("x", peer="x"), FAILED),
        (RegionError("x", region="x"), FAILED),
    ],
    ids=lambda value: type(value).__name__,
)
def test_exit_code_says_whether_another_start_may_help(error: H3Error, code: int) -> None:
    assert exit_code(error) == code
