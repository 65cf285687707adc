import io
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from h3kv.core.errors import TierBrokenError
from h3kv.core.types import Tier
from h3kv.telemetry import spans
from h3kv.telemetry.event_log import LogFormat, LogOutlet, log_event
from h3kv.telemetry.trace_context import TraceContext

LOGGER = logging.getLogger("h3kv.somewhere")
CONTEXT = TraceContext(b"\x01" * 16, b"\x02" * 8)


@contextmanager
def outlet(kind: LogFormat, level: int = logging.INFO) -> Iterator[io.StringIO]:
    stream = io.StringIO()
    log = LogOutlet("nvme_io", kind=kind, level=level, stream=stream)
    try:
        yield stream
    finally:
        log.close()
        log.close()


def test_an_event_is_one_line_of_json_with_the_names_of_spans() -> None:
    with outlet(LogFormat.JSON) as stream:
        log_event(LOGGER, "move_ended", {spans.TIER_SOURCE: "nvme", spans.SIZE_BYTES: 4096}, trace=CONTEXT)
    (line,) = stream.getvalue().splitlines()
    fields = json.loads(line)
    assert fields.pop("time").endswith("Z")
    assert fields == {
        "level": "info",
        "service": "nvme_io",
        "event": "move_ended",
        "h3.tier.source": "nvme",
        "h3.size_bytes": 4096,
        "trace_id": "01" * 16,
        "span_id": "02" * 8,
    }


def test_an_event_as_text_begins_with_time_level_service_and_event() -> None:
    with outlet(LogFormat.TEXT) as stream:
        log_event(LOGGER, "region_adopted", {spans.PEER: 'a "b" c', spans.SIZE_BYTES: 1}, level=logging.WARNING)
    time, level, service, event, rest = stream.getvalue().rstrip("\n").split(" ", 4)
    assert time.endswith("Z")
    assert (level, service, event) == ("warning", "nvme_io", "region_adopted")
    assert rest == r'h3.peer.name="a \"b\" c" h3.size_bytes=1'


def test_an_error_of_the_tree_has_its_reason_and_no_traceback() -> None:
    error = TierBrokenError("writing failed: free room on the disk", tier=Tier.NVME)
    with outlet(LogFormat.JSON) as stream:
        log_event(LOGGER, "store_degraded", error=error, level=logging.ERROR)
    fields = json.loads(stream.getvalue())
    assert (fields["h3.error.reason"], fields["error"]) == ("TIER_BROKEN", str(error))
    assert "traceback" not in fields


@pytest.mark.parametrize("kind", LogFormat)
def test_a_mistake_of_ours_has_its_traceback_on_the_same_line(kind: LogFormat) -> None:
    with outlet(kind) as stream:
        try:
            {}["slot"]
        except KeyError as error:
            log_event(LOGGER, "tick_failed", error=error, level=logging.ERROR)
    (line,) = stream.getvalue().splitlines()
    assert "Traceback" in line
    assert "KeyError" in line


@pytest.mark.parametrize("kind", LogFormat)
def test_lines_of_libraries_keep_their_words_on_one_line(kind: LogFormat) -> None:
    with outlet(kind) as stream:
        logging.getLogger("library").warning("two\nlines of %s", "text")
    (line,) = stream.getvalue().splitlines()
    assert "two\\nlines of text" in line
    assert "library" in line


def test_what_is_below_the_level_is_left_out() -> None:
    with outlet(LogFormat.TEXT, logging.WARNING) as stream:
        log_event(LOGGER, "tick_ended")
    assert stream.getvalue() == ""


def test_after_closing_nothing_is_written_and_the_level_is_as_before() -> None:
    before = logging.getLogger().level
    with outlet(LogFormat.TEXT, logging.DEBUG) as stream:
        pass
    log_event(LOGGER, "too_late", level=logging.CRITICAL)
    assert stream.getvalue() == ""
    assert logging.getLogger().level == before


def test_undeclared_names_are_our_own_mistake() -> None:
    with pytest.raises(AssertionError, match="no name of an event"):
        log_event(LOGGER, "Something happened")
    with pytest.raises(AssertionError, match="not declared"):
        log_event(LOGGER, "move_ended", {"h3.surprise": 1})
