"""`h3 up`: the processes of a node on this machine, until Ctrl-C."""

from __future__ import annotations

import signal
import socket
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Final

from h3kv.config import Settings
from h3kv.core.errors import ConfigError
from h3kv.core.units import NS_PER_S, TokenCount, format_cap, format_size
from h3kv.supervisor.child import ChildSpec
from h3kv.supervisor.log_lines import LineSink
from h3kv.supervisor.node_plan import NodeOptions, facts_of, find_services, plan_node
from h3kv.supervisor.run_folder import held_folder, make_folder, remove_facts, write_facts
from h3kv.supervisor.supervisor import Supervisor, SupervisorConfig
from h3kv.telemetry.metric import Service
from h3kv.tenant_file import read_tenant_file

SECTIONS: Final = ("model", "device", "attention", "tiering", "engine", "runtime")
"""Of `h3_config.yaml`, that `gpu_worker` takes under the same names. The others are for `nvme_io`."""
OWN_NAME: Final = "h3"
ANSWERS_SHARE: Final = 0.6
"""Of the time in which a node ends: answers may run so long. The supervisor gives the gateway more, so that those which
run longer are told."""
ANSWERS_S_MAX: Final = 3600.0
"""The gateway takes no more."""


@dataclass(frozen=True, slots=True)
class UpRequest:
    """What was asked for on the command line."""

    run_folder: Path
    offload_workers: int
    http_host: str
    http_port: int
    directory: str
    tracing_endpoint: str | None
    drain_ns: int
    tenants_file: Path | None = None
    """Of the gateway: who may ask, by API keys."""


class EndSignals:
    """Ctrl-C and SIGTERM while it is entered: the first asks to end, the second to hurry."""

    def __init__(self) -> None:
        self._came = threading.Event()
        self._count = 0

    @property
    def is_ending(self) -> bool:
        """Whether one came."""
        return self._count > 0

    @property
    def is_hurried(self) -> bool:
        """Whether another one came after it."""
        return self._count > 1

    def wait(self, duration_ns: int) -> None:
        """Return after that time, or when a signal comes."""
        self._came.wait(duration_ns / NS_PER_S)
        self._came.clear()

    def __enter__(self) -> EndSignals:
        self._before = {each: signal.signal(each, self._remember) for each in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        self._count += 1
        self._came.set()


def run_node(settings: Settings, request: UpRequest) -> None:
    """Start all processes, keep them running, and end them on Ctrl-C.

    Raises:
        ConfigError: `services` cannot be found, a process refuses its settings, the file of tenants cannot be used,
            the folder is open to others, or HTTP cannot be served.
        AddressInUseError: another node runs in the folder.
        PeerUnavailableError: a process does not serve in time.
    """
    if request.tenants_file is not None:
        read_tenant_file(request.tenants_file)
    specs = plan_node(_options(settings, request), services_folder=find_services())
    make_folder(request.run_folder)
    with held_folder(request.run_folder):
        _check_port(request)
        _run_held(specs, request)


def _check_port(request: UpRequest) -> None:
    """Raise ConfigError where HTTP could not be served, before a model is loaded for it."""
    try:
        family = socket.AF_INET6 if ":" in request.http_host else socket.AF_INET
        with socket.create_server((request.http_host, request.http_port), family=family):
            return
    except OSError as error:
        # The words of the module that refused it come in brackets behind those of the system.
        reason = str(error.strerror).partition(" (")[0]
        raise ConfigError(
            f"nothing can be served at {request.http_host}:{request.http_port} ({reason}): end what serves "
            "there, or name another with --http-port",
            field="http_port",
        ) from error


def _run_held(specs: list[ChildSpec], request: UpRequest) -> None:
    sink = LineSink(sys.stderr, width=max(len(spec.name) for spec in specs))
    with EndSignals() as signals:
        supervisor = Supervisor(
            specs,
            sink,
            config=SupervisorConfig(drain_ns=request.drain_ns),
            wait=signals.wait,
            is_ending=lambda: signals.is_ending,
        )
        try:
            write_facts(request.run_folder, facts_of(specs))
            supervisor.start()
            if not signals.is_ending:
                url = f"http://{request.http_host}:{request.http_port}"
                sink.write(OWN_NAME, f"the node answers at {url}/v1; Ctrl-C ends it")
            supervisor.watch()
            sink.write(OWN_NAME, "ending; Ctrl-C again ends it at once")
        finally:
            supervisor.close(is_hurried=lambda: signals.is_hurried)
            remove_facts(request.run_folder)


def _options(settings: Settings, request: UpRequest) -> NodeOptions:
    worker = {name.upper(): getattr(settings, name).model_dump_json() for name in SECTIONS}
    # What nobody said keeps its own default there: how long an answer is.
    worker["ENGINE"] = settings.engine.model_dump_json(exclude_unset=True)
    return NodeOptions(
        run_folder=request.run_folder,
        offload_workers=request.offload_workers,
        http_host=request.http_host,
        http_port=request.http_port,
        directory=request.directory,
        tracing_endpoint=request.tracing_endpoint,
        settings={Service.GPU_WORKER: worker, Service.NVME_IO: _caps(settings), Service.GATEWAY: _doors(request)},
    )


def _caps(settings: Settings) -> dict[str, str]:
    """What `nvme_io` takes of the sections for HOST and the cold store; its own defaults where nothing was said.

    Raises:
        ConfigError: a cap in tokens, whose bytes only the model knows.
    """
    nvme = settings.nvme
    told = {
        "HOST_BYTES": _bytes(settings.host.kv_bytes, "host.kv_bytes"),
        "INDEX_BYTES": _bytes(settings.host.index_bytes, "host.index_bytes"),
        "CAPACITY": _bytes(nvme.capacity, "nvme.capacity"),
        "WRITE_BYTES_PER_DAY": _bytes(nvme.write_bytes_per_day, "nvme.write_bytes_per_day"),
        "STORE": None if nvme.store is None else str(nvme.store.absolute()),
        "BACKEND": nvme.backend,
        "WRAP": nvme.wrap,
    }
    return {name: value for name, value in told.items() if value is not None}


def _doors(request: UpRequest) -> dict[str, str]:
    """What `gateway` is told besides where it serves."""
    seconds = min(ANSWERS_SHARE * request.drain_ns / NS_PER_S, ANSWERS_S_MAX)
    told = {"DRAIN_SECONDS": f"{seconds:g}"}
    if request.tenants_file is not None:
        told["TENANTS_FILE"] = str(request.tenants_file.absolute())
    return told


def _bytes(cap: int | TokenCount | str | None, field: str) -> str | None:
    if isinstance(cap, TokenCount):
        message = f"{field} = {format_cap(cap)}: a node of processes takes it in bytes, such as 4GiB"
        raise ConfigError(message, field=field)
    return format_size(cap) if isinstance(cap, int) else None
