"""What the tests of nvme_io share: the process itself, and clients in this process over its regions."""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from h3kv.core.errors import PeerTimeoutError
from h3kv.core.layout import CacheLayout
from h3kv.core.units import NS_PER_S
from h3kv.engine.remote_tiers import wire_layout
from h3kv.rpc.addresses import UnixAddress
from h3kv.rpc.client import PeerChannel
from h3kv.testing.engines import FINGERPRINT, LAYOUT
from h3kv.tiers.cold.geometry import capacity_for
from h3kv.tiers.remote.link import NodeLink

ROOT = Path(__file__).parents[2]
DEADLINE_S = 60.0


class NvmeIo:
    """`python -m services.nvme_io` in a folder, which may be killed and started again.

    Args:
        folder: of sockets, log and store.
        settings: environment below `H3_NVME_IO_`, besides the places.
    """

    def __init__(self, folder: Path, **settings: str) -> None:
        self.folder = folder
        self.address = UnixAddress(folder / "nvme_io.sock")
        self.regions = folder / "regions.sock"
        places = {"ADDRESS": str(self.address), "STORE": str(folder / "store"), "METRICS__PORT": "0"}
        (folder / "store").mkdir(exist_ok=True)
        told = {f"H3_NVME_IO_{name}": value for name, value in {**places, **settings}.items()}
        self._environment = {**os.environ, **told, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with (self.folder / "nvme_io.log").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "services.nvme_io"], env=self._environment, stdout=log, stderr=log, cwd=ROOT
            )

    def wait_until_serving(self) -> None:
        with PeerChannel(self.address) as channel:
            end = time.monotonic() + DEADLINE_S
            while True:
                assert self.process is not None and self.process.poll() is None, self.log
                try:
                    return channel.wait_until_serving(timeout_ns=NS_PER_S)
                except PeerTimeoutError:
                    assert time.monotonic() < end, self.log

    def signal(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self.wait()

    def end(self) -> int:
        """As it is told to end: its exit code."""
        self.signal(signal.SIGTERM)
        return self.wait()

    def wait(self) -> int:
        assert self.process is not None
        code = self.process.wait(timeout=DEADLINE_S)
        self.process = None
        return code

    @property
    def log(self) -> str:
        return (self.folder / "nvme_io.log").read_text()


def settings_for(layout: CacheLayout = LAYOUT, *, host_blocks: int = 48, units: int = 8) -> dict[str, str]:
    """Caps in blocks of a model over all layers."""
    return {
        "HOST_BYTES": f"{host_blocks * layout.block_bytes}B",
        "CAPACITY": f"{capacity_for(layout, units=units)}B",
        "INDEX_BYTES": "1MiB",
    }


@contextlib.contextmanager
def nvme_io(folder: Path, **settings: str) -> Iterator[NvmeIo]:
    """The process, serving."""
    running = NvmeIo(folder, **settings)
    running.start()
    try:
        running.wait_until_serving()
        yield running
    finally:
        if running.process is not None:
            with contextlib.suppress(ProcessLookupError):
                running.signal(signal.SIGCONT)
            running.kill()


@contextlib.contextmanager
def linked(
    server: NvmeIo, *, layout: CacheLayout = LAYOUT, fingerprint: bytes = FINGERPRINT, name: str = "gpu_worker"
) -> Iterator[NodeLink]:
    """A client that is registered."""
    with PeerChannel(server.address) as channel:
        link = NodeLink(
            server.regions,
            channel,
            layout=wire_layout(layout, fingerprint),
            name=name,
            boot_token=secrets.token_bytes(16),
        )
        link.open(int(DEADLINE_S * NS_PER_S))
        try:
            yield link
        finally:
            link.close()


def eventually(is_true: Callable[[], bool], what: str) -> None:
    """Poll until something holds."""
    end = time.monotonic() + DEADLINE_S
    while not is_true():
        assert time.monotonic() < end, what
        select.select([], [], [], 0.005)
