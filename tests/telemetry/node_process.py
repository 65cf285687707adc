"""All processes of a node under a supervisor, as `h3 up` runs them, with settings that it has no flags for.

`python node_process.py RUN_FOLDER HTTP_PORT OTLP SETTINGS`: settings of each service, as JSON. Ends on SIGINT.
"""

from __future__ import annotations

import contextlib
import json
import socket
import sys
from dataclasses import replace
from pathlib import Path

from h3kv.cli.up import EndSignals
from h3kv.core.units import NS_PER_S
from h3kv.supervisor.child import ChildSpec
from h3kv.supervisor.log_lines import LineSink
from h3kv.supervisor.node_plan import LOOPBACK, NodeOptions, facts_of, find_services, plan_node
from h3kv.supervisor.run_folder import make_folder, remove_facts, write_facts
from h3kv.supervisor.supervisor import Supervisor, SupervisorConfig
from h3kv.telemetry.metric import Service
from h3kv.telemetry.metrics_server import PATH

OFFLOAD_WORKERS = 2
IS_UP = "the node is up"


def on_free_ports(specs: list[ChildSpec]) -> list[ChildSpec]:
    """The same with other ports for metrics: the usual ones are wanted by every node on this machine."""
    moved = []
    with contextlib.ExitStack() as held:
        for spec in specs:
            probe = held.enter_context(socket.socket())
            probe.bind((LOOPBACK, 0))
            port = probe.getsockname()[1]
            told = {
                key: str(port) if key.endswith("METRICS__PORT") else value for key, value in spec.environment.items()
            }
            moved.append(replace(spec, environment=told, metrics_url=f"http://{LOOPBACK}:{port}{PATH}"))
    return moved


def main(run_folder: Path, http_port: int, endpoint: str, settings: dict[Service, dict[str, str]]) -> None:
    options = NodeOptions(
        run_folder, OFFLOAD_WORKERS, http_port=http_port, tracing_endpoint=endpoint, settings=settings
    )
    specs = on_free_ports(plan_node(options, services_folder=find_services()))
    make_folder(run_folder)
    sink = LineSink(sys.stderr, width=20)
    with EndSignals() as signals:
        config = SupervisorConfig(drain_ns=10 * NS_PER_S)
        supervisor = Supervisor(specs, sink, config=config, wait=signals.wait, is_ending=lambda: signals.is_ending)
        try:
            write_facts(run_folder, facts_of(specs))
            supervisor.start()
            sink.write("test", IS_UP)
            supervisor.watch()
        finally:
            supervisor.close(is_hurried=lambda: signals.is_hurried)
            remove_facts(run_folder)


if __name__ == "__main__":
    told = json.loads(sys.argv[4])
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], {Service(name): each for name, each in told.items()})
