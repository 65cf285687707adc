"""Spread attention with helpers on threads of the tests' own process."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

from h3kv.attention.helping import AttentionHelper, TracedHelp
from h3kv.attention.offload import SpreadAttention
from h3kv.core.units import NS_PER_MS
from h3kv.memory.mapping import Mapping
from h3kv.memory.work_area import WorkArea, WorkGeometry

EVERYTHING = (1, 1 << 62)
"""All pages of this process count as shared."""
GEOMETRY = WorkGeometry(helpers=4, jobs=2, job_bytes=1 << 20)


class Spread:
    """A caller and helpers on threads. Helpers reach `ranges`."""

    def __init__(self, geometry: WorkGeometry = GEOMETRY) -> None:
        self.mapping = Mapping(geometry.size_bytes, fd=None)
        self.area = WorkArea.open(self.mapping.view(), geometry)
        self.attention = SpreadAttention(self.area, shared=EVERYTHING)

    @contextlib.contextmanager
    def helped(self, count: int, *, ranges: tuple[tuple[int, int], ...] = (EVERYTHING,)) -> Iterator[None]:
        ends = threading.Event()
        self.traced: list[TracedHelp] = []
        places = [self.attention.join() for _ in range(count)]
        self.helpers = [AttentionHelper(WorkArea.attach(self.mapping.view()), each, ranges=ranges) for each in places]

        def serve(helper: AttentionHelper) -> None:
            while not ends.is_set():
                traced = helper.serve(deadline_ns=time.monotonic_ns() + NS_PER_MS)
                if traced is not None:
                    self.traced.append(traced)

        threads = [threading.Thread(target=serve, args=(helper,)) for helper in self.helpers]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            ends.set()
            for thread in threads:
                thread.join()
            for place in places:
                self.attention.bury(place)

    def close(self) -> None:
        self.attention.check_integrity()
        self.attention.close()
