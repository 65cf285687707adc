"""What the tests of spread attention share: the owner of regions and sequences here, and helping processes."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from h3kv.attention import native
from h3kv.attention.crew import CrewHub
from h3kv.attention.native import PAGE_DTYPE, TORCH_DTYPES, RunOffsets
from h3kv.attention.offload import SpreadAttention
from h3kv.core.layout import PageLayout
from h3kv.core.limits import BLOCK_TOKENS
from h3kv.core.units import NS_PER_MS, NS_PER_S
from h3kv.memory.region import Region
from h3kv.memory.region_format import OpaqueGeometry, RegionIdentity
from h3kv.memory.region_hub import RegionHub
from h3kv.memory.work_area import PURPOSE, WorkArea, WorkGeometry

PROGRAM = Path(__file__).with_name("offload_process.py")
TOKEN = b"o" * 16
WORK = WorkGeometry(helpers=8, jobs=4, job_bytes=1 << 20)
HOST_BYTES = 32 << 20


class HelperProcess:
    """A process of `offload_process.py`."""

    def __init__(self, folder: Path, name: str, *, threads: int = 1, spin_us: int = 50) -> None:
        command = [sys.executable, str(PROGRAM), str(folder / "regions"), str(folder / "crew"), name]
        self.process = subprocess.Popen(
            [*command, str(threads), str(spin_us * 1000)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            # Services are no package that is installed: they are found from the root of the checkout.
            env=os.environ | {"PYTHONPATH": str(PROGRAM.parents[2])},
        )

    def status(self) -> dict[str, Any]:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        assert line, "the process ended"
        answer: dict[str, Any] = json.loads(line)
        return answer

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self._end()

    def leave(self) -> None:
        """End as it is meant to."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        assert self.process.wait(timeout=60) == 0
        self._end()

    def _end(self) -> None:
        self.process.wait(timeout=60)
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()


class Node:
    """Regions, their owner's hub, the work area and the crew's hub; a thread serves both hubs."""

    def __init__(self, folder: Path, *, work: WorkGeometry = WORK, host_bytes: int = HOST_BYTES) -> None:
        self.folder = folder
        self.hub = RegionHub.open(folder / "regions", boot_token=TOKEN)
        self.adopted = self.hub.adopt(20 * NS_PER_S)
        self.host, self.work = self.adopted or (
            Region.create(OpaqueGeometry(host_bytes), identity=RegionIdentity(1, "host", TOKEN)),
            Region.create(OpaqueGeometry(work.size_bytes), identity=RegionIdentity(2, PURPOSE, TOKEN)),
        )
        self.hub.serve([self.host, self.work])
        self.area = WorkArea.open(self.work.slots, work)
        self.spread = SpreadAttention(self.area)
        self.crew = CrewHub(folder / "crew", self.spread)
        self.used = 0
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def pages(self, tokens: int, layout: PageLayout, *, kv_heads: int, generator: torch.Generator) -> NDArray[np.void]:
        """Pages of random tokens in the host region."""
        pages = -(-tokens // BLOCK_TOKENS)
        sizes = (layout.size_bytes, layout.plane_bytes, layout.residues_bytes)
        index_KN = np.arange(kv_heads * pages, dtype=np.uint64).reshape(kv_heads, pages)
        address = self.host.address + self.host.geometry.data_offset + self.used
        starts = np.cumsum([0, *(kv_heads * pages * size for size in sizes)], dtype=np.uint64)
        self.used += int(starts[-1])
        assert self.used <= self.host.geometry.data_bytes
        offsets = RunOffsets(
            *(start + index_KN * np.uint64(size) for start, size in zip(starts[:-1], sizes, strict=True))
        )
        table_KN = np.zeros((kv_heads, pages), dtype=PAGE_DTYPE)
        native.write_addresses(table_KN, 0, address, offsets, layout=layout)
        table_KN["first"] = np.arange(pages) * BLOCK_TOKENS
        table_KN["count"] = np.clip(tokens - table_KN["first"], 0, BLOCK_TOKENS)
        shape = (tokens, kv_heads, layout.head_dim)
        k_SKD, v_SKD = (torch.randn(shape, generator=generator).to(TORCH_DTYPES[layout.dtype]) for _ in range(2))
        native.append(k_SKD, v_SKD, table_KN, layout=layout, index=0)
        return table_KN

    def await_helpers(self, count: int) -> None:
        self.until(lambda: self.spread.statistics().helpers == count, f"{count} helpers")

    def until(self, holds: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + 60
        while not holds():
            assert time.monotonic() < deadline, what
            os.sched_yield()

    def close(self) -> None:
        """Nobody helps any more: everything must be as it was."""
        self.await_helpers(0)
        self._stop()
        self.crew.check_integrity()
        self.spread.check_integrity()
        self.spread.close()
        self._let_go()

    def abandon(self) -> None:
        """End as a process does that is killed, with helpers at work."""
        self._stop()
        self._let_go()

    def _stop(self) -> None:
        self._ends.set()
        self._thread.join()

    def _let_go(self) -> None:
        self.crew.close()
        self.hub.close()
        self.adopted = ()
        del self.area, self.spread, self.crew
        gc.collect()
        for region in (self.host, self.work):
            region.close()

    def _serve(self) -> None:
        while not self._ends.is_set():
            self.hub.poll(5 * NS_PER_MS)
            self.crew.poll(5 * NS_PER_MS)
