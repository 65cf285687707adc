"""A whole node whose processes are started again at once: `python node_process.py FOLDER PORT SETTINGS`.

As `h3 up` runs it, but that a killed process comes back without a pause that grows, so that a test may kill it often.
While the file `FOLDER/gone` is there, a new controller does not begin. `FOLDER/pids` names the processes that live.

    SETTINGS   {"gpu_worker": {"MODEL": "..."}, ...}   environment of each service, without its prefix
"""

from __future__ import annotations

import json
import signal
import sys
import threading
from dataclasses import replace
from pathlib import Path
from types import FrameType

from h3kv.core.units import NS_PER_MS, NS_PER_S
from h3kv.supervisor.child import ChildSpec
from h3kv.supervisor.log_lines import LineSink
from h3kv.supervisor.node_plan import NodeOptions, find_services, plan_node
from h3kv.supervisor.restarts import RestartConfig
from h3kv.supervisor.supervisor import Supervisor, SupervisorConfig
from h3kv.telemetry.metric import Service

LOOK_NS = 20 * NS_PER_MS
FAST = RestartConfig(first_ns=NS_PER_MS, longest_ns=NS_PER_MS)
WAITING = 'while [ -e "$0" ]; do sleep 0.05; done; exec "$@"'


class Ending:
    """Whether this process was told to end."""

    def __init__(self) -> None:
        self.came = threading.Event()
        signal.signal(signal.SIGTERM, self._remember)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self.came.set()


def held_back(spec: ChildSpec, folder: Path) -> ChildSpec:
    """The same process, which waits for a file to go before it begins."""
    return replace(spec, command=("/bin/sh", "-c", WAITING, str(folder / "gone"), *spec.command))


def main(folder: Path, port: int, settings: dict[str, dict[str, str]]) -> None:
    options = NodeOptions(
        run_folder=folder,
        offload_workers=1,
        http_port=port,
        settings={Service(name): told for name, told in settings.items()},
    )
    specs = plan_node(options, services_folder=find_services())
    controller = Service.MIGRATION_CONTROLLER.value
    ending, said = Ending(), ""

    def wait(duration_ns: int) -> None:
        nonlocal said
        pids = json.dumps(supervisor.pids)
        if pids != said:
            (folder / "pids.new").write_text(pids)
            (folder / "pids.new").replace(folder / "pids")
            said = pids
        ending.came.wait(min(duration_ns, LOOK_NS) / NS_PER_S)

    supervisor = Supervisor(
        [held_back(spec, folder) if spec.name == controller else spec for spec in specs],
        LineSink(sys.stderr, width=20),
        config=SupervisorConfig(drain_ns=80 * NS_PER_S, restarts=FAST),
        wait=wait,
        is_ending=ending.came.is_set,
    )
    try:
        supervisor.start()
        (folder / "up").touch()
        supervisor.watch()
    finally:
        supervisor.close()
        supervisor.check_integrity()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3]))
