"""One service of the node as a process of its own, for as long as something is measured."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Final

from h3kv.core.errors import PeerTimeoutError, PeerUnavailableError
from h3kv.core.units import NS_PER_S
from h3kv.rpc.addresses import Address
from h3kv.rpc.client import PeerChannel
from h3kv.supervisor.launch import tied
from h3kv.supervisor.node_plan import find_services

START_NS: Final = 60 * NS_PER_S
"""Until a process serves."""
LOOK_NS: Final = NS_PER_S
"""After which it is looked whether the process is still there."""
END_S: Final = 10.0
"""For a process to end when it is told to."""
QUIET: Final = {"METRICS__PORT": "0", "LOGS__LEVEL": "warning"}


@contextlib.contextmanager
def service_process(name: str, address: Address, settings: Mapping[str, str]) -> Iterator[int]:
    """`python -m services.NAME`, from when it serves. Gives its process id.

    Args:
        name: of the service.
        address: where it serves.
        settings: of its environment, without the prefix.

    Raises:
        ConfigError: `services` is not there: the wheel leaves it out.
        PeerUnavailableError: it does not come up.
    """
    told = {"ADDRESS": str(address), **QUIET, **settings}
    # Nothing of what people set for a node of theirs.
    environment = {variable: value for variable, value in os.environ.items() if not variable.startswith("H3_")}
    environment |= {f"H3_{name.upper()}_{key}": value for key, value in told.items()}
    command = tied([sys.executable, "-m", f"services.{name}"])
    with subprocess.Popen(command, env=environment, cwd=find_services()) as process:
        try:
            _wait_until_serving(name, address, process)
            yield process.pid
        finally:
            _end(process)


def _wait_until_serving(name: str, address: Address, process: subprocess.Popen[bytes]) -> None:
    end_ns = time.monotonic_ns() + START_NS
    with PeerChannel(address) as channel:
        while process.poll() is None and time.monotonic_ns() < end_ns:
            with contextlib.suppress(PeerTimeoutError):
                channel.wait_until_serving(timeout_ns=LOOK_NS)
                return
    message = f"services.{name} does not serve: what it wrote above says why"
    raise PeerUnavailableError(message, peer=name)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()
