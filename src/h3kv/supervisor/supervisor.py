"""Starts the processes of a node in order, keeps them running, and ends them in the opposite order.

stage 0 --all serve--> stage 1 --all serve--> ... --> watch: who ends is started again, after a pause
                                                |
ended, stage by stage from the last, each within its part of the drain time, then killed <---+
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from h3kv.core.errors import ConfigError, PeerUnavailableError
from h3kv.core.units import NS_PER_MS, NS_PER_S
from h3kv.supervisor.child import Child, ChildSpec
from h3kv.supervisor.log_lines import LineSink
from h3kv.supervisor.restarts import RestartConfig, Restarts

REFUSED: Final = 2
"""Exit code of a process whose settings are wrong: starting it again does not help."""
ENDING_NS: Final = 2 * NS_PER_S
"""For a process that has nothing to wait for to end."""
LOOK_NS: Final = 100 * NS_PER_MS
"""Between two looks at the children."""


@dataclass(frozen=True, slots=True)
class SupervisorConfig:
    """Bounds of a node's life."""

    start_ns: int = 600 * NS_PER_S
    """For a process to serve: a large model takes minutes to load."""
    drain_ns: int = 30 * NS_PER_S
    """From the wish to end to the last process's end. What lives then is killed."""
    restarts: RestartConfig = field(default_factory=RestartConfig)


@dataclass(slots=True)
class _Place:
    """A process of the node, running or not."""

    spec: ChildSpec
    restarts: Restarts
    child: Child | None = None
    began_ns: int = 0
    served_ns: int | None = None
    """Since when it serves; None: not yet."""
    due_ns: int = 0
    """When it is started again."""


class Supervisor:
    """For the main thread. `close` leaves no child behind.

    Args:
        specs: of all processes.
        sink: receives what they write, and what happens to them.
        config: bounds.
        wait: returns after so many nanoseconds, or sooner when it is time to end.
        is_ending: whether it is time to end.
    """

    def __init__(
        self,
        specs: Sequence[ChildSpec],
        sink: LineSink,
        *,
        config: SupervisorConfig,
        wait: Callable[[int], None],
        is_ending: Callable[[], bool],
    ) -> None:
        assert len({spec.name for spec in specs}) == len(specs), "two processes have one name"
        self._places = [_Place(spec, Restarts(config.restarts)) for spec in specs]
        self._sink = sink
        self._config = config
        self._wait = wait
        self._is_ending = is_ending

    @property
    def pids(self) -> dict[str, int]:
        """Of the processes that live, by name."""
        return {each.spec.name: each.child.pid for each in self._places if each.child is not None}

    @property
    def restarts(self) -> dict[str, int]:
        """How often each was started again."""
        return {each.spec.name: each.restarts.count for each in self._places}

    def start(self) -> None:
        """Start all, stage by stage. Returns early when it is time to end.

        Raises:
            ConfigError: a process refuses its settings; its lines say which.
            PeerUnavailableError: one does not serve in time.
        """
        for stage in sorted({each.spec.stage for each in self._places}):
            starting = [each for each in self._places if each.spec.stage == stage]
            for place in starting:
                self._begin(place)
            end_ns = time.monotonic_ns() + self._config.start_ns
            while not self._is_ending() and not all(each.served_ns for each in starting):
                self.look()
                self._refuse(starting, is_late=time.monotonic_ns() >= end_ns)
                self._wait(LOOK_NS)

    def look(self) -> None:
        """See who serves and who ended, and start again what is due."""
        now_ns = time.monotonic_ns()
        for place in self._places:
            if place.child is None:
                if place.began_ns and place.due_ns <= now_ns:
                    self._begin(place)
                continue
            code = place.child.exit_code()
            if code is not None:
                self._ended(place, code)
            elif place.served_ns is None and place.spec.is_serving():
                place.served_ns = time.monotonic_ns()
                seconds = (place.served_ns - place.began_ns) / NS_PER_S
                self._sink.write(place.spec.name, f"serves after {seconds:.1f} s")

    def watch(self) -> None:
        """Look until it is time to end."""
        while not self._is_ending():
            self.look()
            self._wait(LOOK_NS)

    def close(self, *, is_hurried: Callable[[], bool] = lambda: False) -> None:
        """End all, stage by stage from the last. Calling it again does nothing.

        Args:
            is_hurried: whether to kill at once what still lives.
        """
        stages = sorted({each.spec.stage for each in self._places}, reverse=True)
        end_ns = time.monotonic_ns() + self._config.drain_ns
        for number, stage in enumerate(stages):
            living = [each for each in self._places if each.spec.stage == stage and each.child is not None]
            # The first is where answers run: it has all of the time but a tenth for each stage after it. None is killed
            # that has nothing to wait for.
            later_ns = (len(stages) - number - 1) * self._config.drain_ns // 10
            self._end(living, max(end_ns - later_ns, time.monotonic_ns() + ENDING_NS), is_hurried)

    def check_integrity(self) -> None:
        """Assert that nothing runs. After `close`."""
        assert not self.pids, f"still there: {self.pids}"

    def _begin(self, place: _Place) -> None:
        place.child = Child(place.spec, self._sink)
        place.began_ns, place.served_ns = time.monotonic_ns(), None

    def _ended(self, place: _Place, code: int) -> None:
        assert place.child is not None
        place.child.collect()
        place.child = None
        served_ns = 0 if place.served_ns is None else time.monotonic_ns() - place.served_ns
        if code == REFUSED and place.served_ns is None and not place.restarts.count:
            place.began_ns = 0  # Not started again: `_refuse` ends the node.
            raise ConfigError(f"{place.spec.name} refuses to start: its lines above say why", field=place.spec.name)
        pause_ns = place.restarts.pause_ns(served_ns)
        place.due_ns, place.served_ns = time.monotonic_ns() + pause_ns, None
        self._sink.write(place.spec.name, f"ended ({_named(code)}): started again in {pause_ns / NS_PER_S:g} s")

    def _refuse(self, starting: Sequence[_Place], *, is_late: bool) -> None:
        late = [each.spec for each in starting if each.served_ns is None]
        if is_late and late:
            names = ", ".join(each.name for each in late)
            message = f"{names} does not serve after {self._config.start_ns / NS_PER_S:g} s: the lines above say why"
            raise PeerUnavailableError(message, peer=late[0].address or late[0].name)

    def _end(self, living: Sequence[_Place], end_ns: int, is_hurried: Callable[[], bool]) -> None:
        children = [place.child for place in living if place.child is not None]
        for child in children:
            child.ask_to_end()
        while any(child.exit_code() is None for child in children):
            if is_hurried() or time.monotonic_ns() >= end_ns:
                break
            self._wait(LOOK_NS)
        for place, child in zip(living, children, strict=True):
            if child.exit_code() is None:
                self._sink.write(place.spec.name, "did not end in time: killed")
                child.kill()
            child.collect()
            place.child, place.began_ns = None, 0


def _named(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"code {code}"
