"""The servers that are measured: whole nodes, a node without tiers, and vLLM with its own HTTP server."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Final

from h3kv.bench.measure import Progress
from h3kv.bench.serve_client import Target, learn
from h3kv.bench.serve_http import Address, Connection
from h3kv.bench.service_process import service_process
from h3kv.bench.whole_node import WholeNode, free_port
from h3kv.core.errors import PeerUnavailableError
from h3kv.core.units import NS_PER_S
from h3kv.rpc.addresses import UnixAddress
from h3kv.supervisor.launch import tied
from h3kv.supervisor.node_plan import LOOPBACK, find_services

START_NS: Final = 600 * NS_PER_S
"""Until a server answers: vLLM compiles its graphs before."""
END_S: Final = 30.0
LOOK_S: Final = 0.2
LOG_TAIL: Final = 2_000
"""Characters of a server's log that an error brings along."""
VLLM_NAME: Final = "model"
VLLM_KV_GIB: Final = 2


@dataclass(frozen=True, slots=True)
class Threads:
    """How vLLM's threads are placed."""

    name: str
    """In metrics."""
    environment: Mapping[str, str]


def vllm_threads() -> tuple[Threads, ...]:
    """Its two settings: all processors but one, which is left to driver and HTTP; and unbound threads, one for each."""
    allowed = sorted(os.sched_getaffinity(0))
    bound = allowed[:-1] or allowed
    return (
        Threads("vllm_bound", _placed(",".join(map(str, bound)), len(bound))),
        Threads("vllm_unbound", _placed("nobind", len(allowed))),
    )


def _placed(bind: str, threads: int) -> dict[str, str]:
    # Without a number of its own, a server of vLLM computes with one thread.
    return {"VLLM_CPU_OMP_THREADS_BIND": bind, "OMP_NUM_THREADS": str(threads)}


@contextlib.contextmanager
def node_server(model: str, flags: Sequence[str], *, name: str = "h3") -> Iterator[tuple[WholeNode, Target]]:
    """A whole node as `h3 up` runs it.

    Args:
        model: folder, file, or `package:NAME`.
        flags: of `h3 up`, besides those of place and model.
        name: in metrics.

    Raises:
        ConfigError: `services` is not there: the wheel leaves it out.
        PeerUnavailableError: the node does not come up.
    """
    # Paths of sockets are short: not below the current folder.
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="h3-")))
        node = stack.enter_context(WholeNode.open(folder, model, flags))
        yield node, asyncio.run(learn(Target(name, Address(LOOPBACK, node.port), node.model)))


@contextlib.contextmanager
def untiered_server(model: str, settings: Mapping[str, str], *, name: str) -> Iterator[Target]:
    """A node without tiers: gpu_worker, all of whose KV lies on the device, behind a gateway.

    Args:
        model: folder, file, or `package:NAME`.
        settings: of gpu_worker's environment, without the prefix.
        name: in metrics.

    Raises:
        ConfigError: `services` is not there.
        PeerUnavailableError: a process does not come up.
    """
    port = free_port()
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="h3-")))
        worker = UnixAddress(folder / "worker.sock")
        told = {"TIERS": "embedded", "MODEL__SOURCE": model, "TIERING__MODE": "off", **settings}
        stack.enter_context(service_process("gpu_worker", worker, told))
        gateway = {"WORKER": str(worker), "HTTP__HOST": LOOPBACK, "HTTP__PORT": str(port), "METRICS__PORT": "0"}
        environment = {f"H3_GATEWAY_{key}": value for key, value in gateway.items()}
        command = [sys.executable, "-m", "services.gateway"]
        served = _served(command, port, environment, log=folder / "gateway.log", cwd=find_services())
        stack.enter_context(served)
        yield asyncio.run(learn(Target(name, Address(LOOPBACK, port), _model_name(model))))


@contextlib.contextmanager
def vllm_server(
    python: str, folder: Path, threads: Threads, *, context_tokens: int, progress: Progress
) -> Iterator[Target]:
    """OpenAI server of vLLM, prefix cache on.

    Args:
        python: interpreter that has vllm.
        folder: exported model.
        threads: where they run.
        context_tokens: longest prompt and answer together.
        progress: hears that it starts, which takes a minute or two.

    Raises:
        PeerUnavailableError: it does not come up.
    """
    progress(f"{threads.name}: starting, which compiles the model")
    port = free_port()
    command = [shutil.which(python) or python, "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(folder), "--served-model-name", VLLM_NAME, "--host", LOOPBACK, "--port", str(port)]
    command += ["--dtype", "bfloat16", "--max-model-len", str(context_tokens), "--enable-prefix-caching"]
    command += ["--enable-prompt-tokens-details"]
    environment = {
        "VLLM_CPU_KVCACHE_SPACE": str(VLLM_KV_GIB),
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        **threads.environment,
    }
    with contextlib.ExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="h3-")))
        group = stack.enter_context(_served(command, port, environment, log=logs / "vllm.log", cwd=Path.cwd()))
        yield asyncio.run(learn(Target(threads.name, Address(LOOPBACK, port), VLLM_NAME, group=group)))


@contextlib.contextmanager
def _served(
    command: Sequence[str], port: int, environment: Mapping[str, str], *, log: Path, cwd: Path
) -> Iterator[int]:
    """A server of HTTP, from when it says that it is well: the group of its processes."""
    # What it is told goes the same way as to a node's processes: nothing of ours is changed.
    settings = [f"{name}={value}" for name, value in environment.items()]
    with log.open("wb") as lines:
        process = subprocess.Popen(tied(command, settings), cwd=cwd, stdout=lines, stderr=lines, process_group=0)
    try:
        _wait(process, port, log)
        yield process.pid
    finally:
        # Signals do not reach those that rest.
        os.killpg(process.pid, signal.SIGCONT)
        process.terminate()
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    end_ns = time.monotonic_ns() + START_NS
    while process.poll() is None and time.monotonic_ns() < end_ns:
        if asyncio.run(_is_well(Address(LOOPBACK, port))):
            return
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(LOOK_S)
    message = f"the server does not come up: {log.read_text(errors='replace')[-LOG_TAIL:]}"
    raise PeerUnavailableError(message, peer=f"{LOOPBACK}:{port}")


async def _is_well(address: Address) -> bool:
    async with Connection(address) as connection:
        with contextlib.suppress(PeerUnavailableError):
            head = await connection.request("GET", "/health")
            await connection.body(head)
            return head.status == HTTPStatus.OK
    return False


def _model_name(model: str) -> str:
    return model.removeprefix("package:").rstrip("/").rpartition("/")[2]
