"""A real process is killed while it writes: what it said was written is there, and all that is there is intact."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path

import pytest

from h3kv.testing.cold_segments import is_intact, open_store, restore

ROUNDS = 6
UNITS = 4

WRITER = """
import sys
from pathlib import Path
from h3kv.core.errors import TierFullError
from h3kv.testing.cold_segments import open_store, restore, settle, submit_segments

def say(word, number):
    sys.stdout.write(f"{word} {number}\\n")
    sys.stdout.flush()

store = open_store(Path(sys.argv[1]), units=int(sys.argv[2]))
held = {number: list(kept.handles_L) for number, kept in restore(store).items()}
number = int(sys.argv[3])
while True:
    sizes = [(number + at, (1, 16, 2, 8, 4)[(number + at) % 5]) for at in range(3)]
    try:
        taken = submit_segments(store, sizes)
    except TierFullError:
        oldest = min(held)
        say("release", oldest)
        store.release(held.pop(oldest))
        continue
    assert all(completion.error is None for completion in settle(store, 2 * len(sizes)))
    held |= taken
    for name in taken:
        say("written", name)
    number += 3
"""


def run_and_kill(folder: Path, first: int, *, lines: int) -> tuple[set[int], set[int]]:
    """Numbers that the process said it had written, and those it said it would give back, before it was killed."""
    command = [sys.executable, "-c", WRITER, str(folder), str(UNITS), str(first)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        said = [process.stdout.readline() for _ in range(lines)]
        process.kill()
        said += process.stdout.readlines()
    words = [line.split() for line in said if line.endswith("\n")]
    return (
        {int(number) for word, number in words if word == "written"},
        {int(number) for word, number in words if word == "release"},
    )


@pytest.mark.slow
def test_killed_writer_loses_nothing_that_it_had_written(tmp_path: Path) -> None:
    expected: set[int] = set()
    for turn in range(ROUNDS):
        written, released = run_and_kill(tmp_path, 1 + 1000 * turn, lines=7 + 6 * turn)
        expected = (expected | written) - released
        with contextlib.closing(open_store(tmp_path, units=UNITS)) as store:
            kept = restore(store)
            store.check_integrity()
            assert set(kept) >= expected
            assert all(is_intact(store, segment) for segment in kept.values())
            expected = set(kept)
    assert expected
