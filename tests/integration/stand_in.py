"""A stand-in for a process of the node, for tests of the supervisor alone: `python stand_in.py FOLDER NAME BEHAVIOUR`.

It says that it serves by a file, writes its number of starts, and then does what its behaviour says.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path


def main(folder: Path, name: str, behaviour: str) -> None:
    starts = folder / f"{name}.starts"
    count = int(starts.read_text()) + 1 if starts.exists() else 1
    starts.write_text(str(count))
    sys.stdout.write(f"{name} start {count} {os.environ.get('STAND_IN', '')}\n")
    sys.stdout.flush()
    ended = threading.Event()
    if behaviour == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    else:
        signal.signal(signal.SIGTERM, lambda *_: ended.set())
    if behaviour == "refuse":
        sys.stdout.write("error: setting x = 1: must be 2\n")
        sys.exit(2)
    if behaviour == "crash twice" and count <= 2:
        sys.exit(1)
    if behaviour == "crash":
        sys.exit(1)
    if behaviour == "slow":
        # Serves once the test says so.
        while not (folder / f"{name}.may_serve").exists() and not ended.wait(0.01):
            pass
    with (folder / "order").open("a") as order:
        order.write(f"+{name} ")
    (folder / f"{name}.serving").touch()
    ended.wait()
    with (folder / "order").open("a") as order:
        order.write(f"-{name} ")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3])
