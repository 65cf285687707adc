"""Log lines of a process: one for each event, as JSON or as text, with the attributes that spans have.

    {"time": "2026-01-31T12:00:00.000Z", "level": "info", "service": "nvme_io", "event": "region_adopted",
     "h3.region.purpose": "host", "trace_id": "4bf9...", "span_id": "00f0..."}

Lines of libraries have a `message` instead of an `event`. A line has no line breaks inside.
"""

from __future__ import annotations

import enum
import json
import logging
import re
import sys
import time
from collections.abc import Iterator
from typing import Final, TextIO

from h3kv.core.errors import H3Error
from h3kv.telemetry import spans
from h3kv.telemetry.trace_context import TraceContext
from h3kv.telemetry.tracing import NOTHING, Attributes, check_attributes

_EVENT: Final = re.compile(r"[a-z][a-z0-9_]{0,62}")
_PLAIN: Final = re.compile(r"[^\s\"'=]+")
_ATTRIBUTES: Final = "h3_attributes"
_TRACE: Final = "h3_trace"
_IS_EVENT: Final = "h3_is_event"


class LogFormat(enum.StrEnum):
    """For programs or for people."""

    JSON = "json"
    TEXT = "text"


def log_event(
    logger: logging.Logger,
    event: str,
    attributes: Attributes = NOTHING,
    *,
    trace: TraceContext | None = None,
    error: BaseException | None = None,
    level: int = logging.INFO,
) -> None:
    """Write one line.

    Args:
        logger: the module's.
        event: what happened, such as `region_adopted`.
        attributes: as of spans.
        trace: context of the span that it belongs to.
        error: what went wrong: its reason, and where it came from when it is none of the tree, which is our mistake.
        level: of `logging`.
    """
    assert _EVENT.fullmatch(event), f"{event!r} is no name of an event"
    check_attributes(attributes)
    if logger.isEnabledFor(level):
        fields = attributes
        if isinstance(error, H3Error):
            fields = {**attributes, spans.ERROR_REASON: error.reason}
        extra = {_IS_EVENT: True, _ATTRIBUTES: fields, _TRACE: trace}
        logger.log(level, event, exc_info=error, extra=extra)


class LineFormatter(logging.Formatter):
    """Makes one line of a record."""

    def __init__(self, service: str, kind: LogFormat) -> None:
        super().__init__()
        self._service = service
        self._kind = kind

    def format(self, record: logging.LogRecord) -> str:
        """See `logging.Formatter.format`."""
        fields = dict(self._fields(record))
        if self._kind is LogFormat.JSON:
            return json.dumps(fields, ensure_ascii=False)
        head = [str(fields.pop(key)) for key in ("time", "level", "service")]
        what = str(fields.pop("event", None) or _one_line(str(fields.pop("message", ""))))
        return " ".join([*head, what, *(f"{key}={_word(value)}" for key, value in fields.items())])

    def _fields(self, record: logging.LogRecord) -> Iterator[tuple[str, object]]:
        milliseconds = int(record.created * 1_000)
        second = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(milliseconds // 1_000))
        yield "time", f"{second}.{milliseconds % 1_000:03d}Z"
        yield "level", record.levelname.lower()
        yield "service", self._service
        if getattr(record, _IS_EVENT, False):
            yield "event", record.msg
        else:
            yield "message", record.getMessage()
            yield "logger", record.name
        yield from getattr(record, _ATTRIBUTES, NOTHING).items()
        trace: TraceContext | None = getattr(record, _TRACE, None)
        if trace is not None:
            yield "trace_id", trace.trace_id.hex()
            yield "span_id", trace.span_id.hex()
        if record.exc_info and (error := record.exc_info[1]) is not None:
            yield "error", str(error) or type(error).__name__
            if not isinstance(error, H3Error):
                yield "traceback", self.formatException(record.exc_info)


class LogOutlet:
    """Takes over this process's log lines until it is closed."""

    def __init__(
        self, service: str, *, kind: LogFormat = LogFormat.TEXT, level: int = logging.INFO, stream: TextIO | None = None
    ) -> None:
        self._handler = logging.StreamHandler(sys.stderr if stream is None else stream)
        self._handler.setFormatter(LineFormatter(service, kind))
        self._root = logging.getLogger()
        self._level_before = self._root.level
        self._root.addHandler(self._handler)
        self._root.setLevel(level)

    def close(self) -> None:
        """Let go of them. The stream stays open. Calling it again does nothing."""
        if self._handler in self._root.handlers:
            self._root.removeHandler(self._handler)
            self._root.setLevel(self._level_before)
            self._handler.flush()


def _word(value: object) -> str:
    """A value as text that a reader can tell from what follows."""
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return text if _PLAIN.fullmatch(text) else json.dumps(text, ensure_ascii=False)


def _one_line(text: str) -> str:
    """Text of a library, on one line."""
    return text.replace("\r", "\\r").replace("\n", "\\n")
