"""Every measurement of the controller, under names that `h3kv.telemetry.names` declares."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Final

from h3kv.core.ports import Telemetry
from h3kv.core.units import NS_PER_S
from h3kv.policy.migration_state import Command, HoldReason
from h3kv.telemetry import names
from h3kv.telemetry.metric import Service

OTHER: Final = "other"
"""What processes are called that are no service of ours: names come from outside and must not make series."""

_SERVICES: Final = {service.value for service in Service}


def service_of(name: str) -> str:
    """The service that a process belongs to: `ann_offload-2` is an `ann_offload`."""
    service = name.partition("-")[0]
    return service if service in _SERVICES else OTHER


class ControllerMetrics:
    """Counts into a `Telemetry`. For the loop's thread alone."""

    def __init__(self, telemetry: Telemetry) -> None:
        self._telemetry = telemetry
        self._reporting: set[str] = set()

    def report(self, process: str) -> None:
        """A report was applied."""
        self._telemetry.count(names.REPORTS, service=service_of(process))

    def reporting(self, processes: Iterable[str]) -> None:
        """These processes have a stream open now."""
        open_streams = Counter(service_of(name) for name in processes)
        for service in self._reporting | open_streams.keys():
            self._telemetry.gauge(names.REPORTING_PROCESSES, open_streams[service], service=service)
        self._reporting |= open_streams.keys()

    def restart(self, process: str) -> None:
        """A process came back as another one."""
        self._telemetry.count(names.PROCESS_RESTARTS, service=service_of(process))

    def decided(self, commands: Iterable[Command]) -> None:
        """The rules gave commands."""
        for command in commands:
            self._telemetry.count(names.DECISIONS, direction=command.direction.value, reason=command.reason.value)

    def held(self, counts: Mapping[HoldReason, int]) -> None:
        """So many segments were not moved, or events changed nothing."""
        for reason, count in counts.items():
            self._telemetry.count(names.HOLDS, count, reason=reason.value)

    def ended(self, outcome: str) -> None:
        """A command ended."""
        self._telemetry.count(names.COMMANDS, outcome=outcome)

    def decision_took(self, duration_ns: int) -> None:
        """From the arrival of a report to the sending of its commands."""
        self._telemetry.observe(names.DECISION_DURATION, duration_ns / NS_PER_S)
