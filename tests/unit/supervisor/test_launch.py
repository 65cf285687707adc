"""A program that is tied to the process that starts it."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path

from h3kv.supervisor.launch import tied

STARTER = """
import subprocess, sys
from h3kv.supervisor.launch import tied
program = subprocess.Popen(tied([sys.executable, "-c", "import time; time.sleep(60)"]))
print(program.pid, flush=True)
program.wait()
"""


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_program_ends_when_the_process_that_started_it_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", STARTER], stdout=subprocess.PIPE, text=True) as starter:
        assert starter.stdout is not None
        pid = int(starter.stdout.readline())
        assert lives(pid)
        starter.kill()
    end_s, pause = time.monotonic() + 20, threading.Event()
    while lives(pid):
        assert time.monotonic() < end_s
        pause.wait(0.01)


def test_program_has_the_settings_and_the_number_that_its_starter_sees() -> None:
    code = "import os; print(os.getpid(), os.environ['A'], os.environ['B'])"
    command = tied([sys.executable, "-c", code], ["A=1", "B=x=y"])
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        said, _ = process.communicate(timeout=60)
    assert said.split() == [str(process.pid), "1", "x=y"]
