"""All that one process of the node tells about itself: metrics, spans, log lines."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from h3kv.core.units import NS_PER_S
from h3kv.telemetry.event_log import LogFormat, LogOutlet
from h3kv.telemetry.metric import Service
from h3kv.telemetry.metrics_page import MetricsPage
from h3kv.telemetry.metrics_server import MetricsAddress, MetricsServer
from h3kv.telemetry.tracing import Tracer, TracingConfig, open_tracer


@dataclass(frozen=True, slots=True)
class TelemetryConfig:
    """Where a process's telemetry goes."""

    metrics: MetricsAddress = field(default_factory=MetricsAddress)
    tracing: TracingConfig = field(default_factory=TracingConfig)
    log_format: LogFormat = LogFormat.TEXT
    log_level: int = logging.INFO
    """Of `logging`."""


class ProcessTelemetry:
    """Open from its making to `stop`; `with` stops it too.

    Args:
        service: what this process is.
        config: where things go.
        instance: its name among processes of the same service, such as `ann_offload-2`.

    Raises:
        AddressInUseError: metrics cannot be served there.
    """

    def __init__(self, service: Service, config: TelemetryConfig, *, instance: str) -> None:
        self.metrics = MetricsPage(service)
        """Satisfies `Telemetry`."""
        self.server = MetricsServer(self.metrics, config.metrics)
        self.server.start()
        self._logs = LogOutlet(instance, kind=config.log_format, level=config.log_level)
        try:
            self.tracer: Tracer = open_tracer(service, config.tracing, self.metrics, instance=instance)
        except BaseException:
            self._close()
            raise

    def stop(self, *, timeout_ns: int = 2 * NS_PER_S) -> bool:
        """Send the spans that wait, for so long, and close the rest. Call it last: until then logs are written.

        Returns:
            Whether all spans went. Calling it again does nothing.
        """
        have_gone = self.tracer.stop(timeout_ns)
        self._close()
        return have_gone

    def _close(self) -> None:
        self.server.stop()
        self._logs.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
