"""How a process of the node begins and ends."""

from __future__ import annotations

import contextlib
import logging
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Final, Generic, NoReturn

from h3kv.config import debug_wanted
from h3kv.core.error_codes import Retry
from h3kv.core.errors import ConfigError, H3Error, ModelError, StoreError
from h3kv.service_settings import SettingsT, describe_settings, read_settings
from h3kv.telemetry import spans
from h3kv.telemetry.event_log import log_event
from h3kv.telemetry.metric import Service
from h3kv.telemetry.metrics_server import DEFAULT_PORTS
from h3kv.telemetry.process_telemetry import ProcessTelemetry

FAILED: Final = 1
"""Starting it again may help."""
REFUSED: Final = 2
"""It will not: a setting, the model or the store must be mended."""

_log = logging.getLogger(__name__)


class Stopped(BaseException):
    """The process was told to end before it served."""


class StopSignal:
    """Whether this process was told to end: by SIGTERM, by SIGINT, or by a part of it that broke.

    Make it in the main thread: Python delivers signals there. The second SIGINT ends the process at once.
    """

    def __init__(self) -> None:
        self._came = threading.Event()
        self.failure: BaseException | None = None
        """What broke; None where the end was asked for."""
        signal.signal(signal.SIGTERM, self._remember)
        signal.signal(signal.SIGINT, self._remember)

    @property
    def came(self) -> bool:
        """Whether it is time to end."""
        return self._came.is_set()

    def check(self) -> None:
        """Raise `Stopped` if it is time to end: for places where leaving gives everything back."""
        if self.came:
            raise Stopped

    def wait(self) -> None:
        """Return when it is time to end."""
        self._came.wait()

    def stop(self, failure: BaseException | None = None) -> None:
        """It is time to end, perhaps because something broke. Any thread may call it."""
        self.failure = self.failure or failure
        self._came.set()

    def _remember(self, number: int, frame: FrameType | None) -> None:
        del frame
        if number == signal.SIGINT and self._came.is_set():
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            signal.raise_signal(signal.SIGINT)
        self._came.set()


@dataclass(frozen=True, slots=True)
class Process(Generic[SettingsT]):
    """What every process of the node has from its begin to its end."""

    settings: SettingsT
    stop: StopSignal
    telemetry: ProcessTelemetry


@contextlib.contextmanager
def open_process(service: Service, kind: type[SettingsT]) -> Iterator[Process[SettingsT]]:
    """Settings, signals and telemetry of a process; says what it runs with, and at the end that it stopped.

    Raises:
        ConfigError: a setting is unknown or against its rule.
        AddressInUseError: the page of metrics cannot be served there.
    """
    settings = read_settings(kind)
    stop = StopSignal()
    config = settings.telemetry(default_port=DEFAULT_PORTS[service])
    with ProcessTelemetry(service, config, instance=settings.instance) as telemetry:
        _log.info("settings: %s", describe_settings(settings))
        yield Process(settings, stop, telemetry)
        log_event(_log, "stopped", {spans.PEER: settings.instance})


def run_process(serve: Callable[[], None]) -> NoReturn:
    """Run a process to its end, and end with an exit code: 0 when it was told to end, else see `exit_code`.

    Args:
        serve: returns when the process was told to end and everything has been given back.
    """
    if not __debug__:
        _end("assertions are off: run it without -O and without PYTHONOPTIMIZE, they guard the data", REFUSED)
    try:
        serve()
    except Stopped:
        sys.exit(0)
    except H3Error as error:
        if debug_wanted():
            traceback.print_exception(error)
        _end(str(error), exit_code(error))
    sys.exit(0)


def exit_code(error: H3Error) -> int:
    """1 where starting again may help, 2 where something must be mended first."""
    must_be_mended = isinstance(error, ConfigError | ModelError | StoreError) and error.retry is Retry.NO
    return REFUSED if must_be_mended else FAILED


def _end(line: str, code: int) -> NoReturn:
    sys.stderr.write(f"error: {' '.join(line.split())}\n")
    sys.exit(code)
