"""Threads beside the engine's own that wrap what is written and unwrap what was read."""

from __future__ import annotations

import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable

from h3kv.core.units import NS_PER_S


class Job(ABC):
    """Work on memory that nobody else touches from `Codec.start` until `end`."""

    failure: Exception | None = None
    """What `run` raised: the work was not done."""

    @abstractmethod
    def run(self) -> None:
        """Do it, on a thread of the codec."""

    @abstractmethod
    def end(self) -> None:
        """Take notice, on the owner's thread."""


class Codec:
    """Runs jobs; their ends come from `poll`. One owner calls it. Threads are started with the first job.

    Args:
        threads: how many.
        wake: called on a thread of the codec whenever a job has ended.
    """

    def __init__(self, threads: int, *, wake: Callable[[], None] | None = None) -> None:
        self._count = threads
        self._wake = wake
        self._threads: list[threading.Thread] = []
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._ended: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self._is_closing = False
        self.in_flight = 0
        """Jobs whose end was not polled."""

    def start(self, job: Job) -> None:
        """Begin a job."""
        if not self._threads:
            self._threads = [
                threading.Thread(target=self._serve, name=f"h3-codec-{number}", daemon=True)
                for number in range(self._count)
            ]
            for thread in self._threads:
                thread.start()
        self.in_flight += 1
        self._jobs.put(job)

    def poll(self) -> None:
        """End the jobs that are done."""
        while self.in_flight and not self._ended.empty():
            self._end(self._ended.get())

    def wait(self, timeout_ns: int) -> None:
        """End jobs as soon as one is done, or return when the time is over or nothing runs."""
        if self.in_flight:
            try:
                self._end(self._ended.get(timeout=timeout_ns / NS_PER_S))
            except queue.Empty:
                return
            self.poll()

    def close(self) -> None:
        """Drop what has not begun and wait for the rest: afterwards no memory is touched."""
        self._is_closing = True
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()
        self._threads.clear()

    def _end(self, job: Job) -> None:
        self.in_flight -= 1
        job.end()

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None:
            if self._is_closing:
                continue
            try:
                job.run()
            except Exception as error:  # noqa: BLE001  (whoever takes the end says what failed; this thread goes on)
                job.failure = error
            finally:
                self._ended.put(job)
                if self._wake is not None:
                    self._wake()
            del job  # what it holds is given back here, not when the next one comes
