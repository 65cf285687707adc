"""Which processes a node has, in which order they start, and what each is told.

stage 0   nvme_io                            owns the regions
stage 1   migration_controller, ann_offload  nobody waits for them, but they are there when the worker comes
stage 2   gpu_worker                         loads the model
stage 3   gateway                            answers clients
"""

from __future__ import annotations

import importlib.util
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from h3kv.core.errors import ConfigError
from h3kv.document_folder import beside_store
from h3kv.memory.work_area import HELPERS_MAX, WorkGeometry
from h3kv.rpc.addresses import UnixAddress
from h3kv.supervisor.child import ChildSpec
from h3kv.supervisor.health import health_of
from h3kv.supervisor.run_folder import ProcessFacts
from h3kv.telemetry.metric import Service
from h3kv.telemetry.metrics_server import DEFAULT_PORTS, PATH

STAGES: Final = {
    Service.NVME_IO: 0,
    Service.MIGRATION_CONTROLLER: 1,
    Service.ANN_OFFLOAD: 1,
    Service.GPU_WORKER: 2,
    Service.GATEWAY: 3,
}
LOOPBACK: Final = "127.0.0.1"
OFFLOAD_WORKERS_MAX: Final = HELPERS_MAX
PACKAGE: Final = Path(__file__).parents[1]


@dataclass(frozen=True, slots=True)
class NodeOptions:
    """What people choose about a node."""

    run_folder: Path
    offload_workers: int = 1
    http_host: str = LOOPBACK
    http_port: int = 8000
    directory: str = "memory"
    """Of the controller, and of gpu_worker for its quotas: `memory`, or the URL of a Redis or Valkey server."""
    tracing_endpoint: str | None = None
    settings: Mapping[Service, Mapping[str, str]] = field(default_factory=dict)
    """More of the environment of each service, without its prefix: `{"MODEL": "{...}"}`."""


def plan_node(options: NodeOptions, *, services_folder: Path) -> list[ChildSpec]:
    """The processes of a node.

    Args:
        options: what was chosen.
        services_folder: a folder in which `services` lies.

    Raises:
        ConfigError: a number is out of bounds.
    """
    if not 0 <= options.offload_workers <= OFFLOAD_WORKERS_MAX:
        raise ConfigError(
            f"offload_workers = {options.offload_workers}: must be 0 to {OFFLOAD_WORKERS_MAX}", field="offload_workers"
        )
    names: list[tuple[Service, str]] = [(each, each.value) for each in Service if each is not Service.ANN_OFFLOAD]
    names += [(Service.ANN_OFFLOAD, f"{Service.ANN_OFFLOAD.value}-{n}") for n in range(options.offload_workers)]
    ports = _metrics_ports(names)
    return [_spec(service, name, options, (services_folder, ports[name])) for service, name in names]


def facts_of(specs: list[ChildSpec]) -> list[ProcessFacts]:
    """What `h3 status` needs to know."""
    return [ProcessFacts(spec.name, spec.address, spec.metrics_url) for spec in specs]


def find_services(*, package: Path = PACKAGE) -> Path:
    """The folder in which `services` lies: the wheel has none.

    Args:
        package: where `h3kv` lies: in a checkout, `services` is near.

    Raises:
        ConfigError: it is nowhere; the message has the cure.
    """
    found = importlib.util.find_spec("services")
    if found is not None and found.submodule_search_locations:
        places = [Path(place).parent for place in found.submodule_search_locations]
    else:
        places = [Path.cwd(), package.parent.parent]
    for place in places:
        if (place / "services/gpu_worker/__main__.py").is_file():
            return place
    raise ConfigError(
        "the processes of a node are not part of the installed package: run `h3 up` in a checkout of the repository, "
        "or start the images with `docker compose up`",
        field="services",
    )


def _spec(service: Service, name: str, options: NodeOptions, place: tuple[Path, int]) -> ChildSpec:
    folder, port = place
    prefix = f"H3_{service.value.upper()}_"
    told = {
        "INSTANCE": name,
        "METRICS__PORT": str(port),
        **_links(service, name, options),
        **options.settings.get(service, {}),
    }
    if options.tracing_endpoint is not None:
        told["TRACING__ENDPOINT"] = options.tracing_endpoint
    socket_address = _address(name, options)
    url = f"http://{options.http_host}:{options.http_port}"
    is_gateway = service is Service.GATEWAY
    return ChildSpec(
        name=name,
        command=(sys.executable, "-m", f"services.{service.value}"),
        stage=STAGES[service],
        is_serving=health_of(f"{url}/health" if is_gateway else str(socket_address)),
        environment={f"{prefix}{key}": value for key, value in told.items()},
        folder=folder,
        address=url if is_gateway else str(socket_address),
        metrics_url=f"http://{LOOPBACK}:{port}{PATH}",
    )


def _links(service: Service, name: str, options: NodeOptions) -> dict[str, str]:
    """Where a process serves, and where it finds the others."""

    def at(peer: Service) -> str:
        return str(_address(peer.value, options))

    own = {"ADDRESS": str(_address(name, options))}
    controller = {"CONTROLLER": at(Service.MIGRATION_CONTROLLER)}
    store = {"NVME_IO": at(Service.NVME_IO)}
    crew = {"CREW": str(options.run_folder / "crew.sock")}
    match service:
        case Service.GATEWAY:
            http = {"HTTP__HOST": options.http_host, "HTTP__PORT": str(options.http_port)}
            return {"WORKER": at(Service.GPU_WORKER), **http}
        case Service.MIGRATION_CONTROLLER:
            return {**own, **store, "GPU_WORKER": at(Service.GPU_WORKER), "DIRECTORY": options.directory}
        case Service.NVME_IO:
            # One thread each; whoever sets more for a worker sets this too, and is not overruled.
            many = options.offload_workers > WorkGeometry().helpers
            threads = {"OFFLOAD_THREADS": str(options.offload_workers)} if many else {}
            return {**own, **controller, **threads}
        case Service.ANN_OFFLOAD:
            return {**own, **controller, **crew, "REGIONS": str(options.run_folder / "regions.sock")}
        case Service.GPU_WORKER:
            kept = {**_documents(options), "DIRECTORY": options.directory}
            return {**own, **store, **controller, **crew, **kept, "TIERS": "services"}


def _documents(options: NodeOptions) -> dict[str, str]:
    store = options.settings.get(Service.NVME_IO, {}).get("STORE")
    folder = beside_store(None if store is None else Path(store))
    return {} if folder is None else {"DOCUMENTS": str(folder)}


def _address(name: str, options: NodeOptions) -> UnixAddress:
    return UnixAddress(options.run_folder / f"{name}.sock")


def _metrics_ports(names: list[tuple[Service, str]]) -> dict[str, int]:
    """For each process the port where Prometheus asks, or a free one where that is taken."""
    ports: dict[str, int] = {}
    with _Ports() as taken:
        for service, name in names:
            ports[name] = taken.take(DEFAULT_PORTS[service])
    return ports


class _Ports:
    """Holds ports while others are looked for, so that none is given twice."""

    def __init__(self) -> None:
        self._sockets: list[socket.socket] = []

    def take(self, wanted: int) -> int:
        """The port, or a free one."""
        held = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._sockets.append(held)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            held.bind((LOOPBACK, wanted))
        except OSError:
            held.bind((LOOPBACK, 0))
        # Only a port that is listened at cannot be bound again.
        held.listen(1)
        return int(held.getsockname()[1])

    def __enter__(self) -> _Ports:
        return self

    def __exit__(self, *_: object) -> None:
        for each in self._sockets:
            each.close()
