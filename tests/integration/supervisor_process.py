"""A supervisor with one stand-in, in a process of its own that a test kills: `python supervisor_process.py FOLDER`."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

from h3kv.core.units import NS_PER_S
from h3kv.supervisor.child import ChildSpec
from h3kv.supervisor.log_lines import LineSink
from h3kv.supervisor.supervisor import Supervisor, SupervisorConfig


def wait(duration_ns: int) -> None:
    threading.Event().wait(duration_ns / NS_PER_S)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    spec = ChildSpec(
        name="child",
        command=(sys.executable, str(Path(__file__).with_name("stand_in.py")), str(folder), "child", "stubborn"),
        stage=0,
        is_serving=(folder / "child.serving").exists,
    )
    supervisor = Supervisor(
        [spec],
        LineSink(sys.stderr, width=5),
        config=SupervisorConfig(),
        wait=wait,
        is_ending=lambda: False,
    )
    supervisor.start()
    (folder / "pid").write_text(str(supervisor.pids["child"]))
    supervisor.watch()
