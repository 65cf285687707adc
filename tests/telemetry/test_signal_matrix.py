"""Every metric that is declared for a service appears on its page once a node has worked, and no other does."""

from __future__ import annotations

import itertools
import os
import signal

import pytest

from h3kv.telemetry import names
from h3kv.telemetry.metric import Service
from h3kv.telemetry.names import METRICS

from .node_rig import WholeNode, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ABSENT_HERE = {
    names.DEVICE_MEMORY_USED: "there is no accelerator",
    names.DISK_READ_WAIT: "the file system need not lie on a disk that counts its reads",
}
"""What some machines lack. Where it is there, it is on the page."""

USED = {
    Service.GATEWAY: {names.HTTP_REQUESTS, names.HTTP_DURATION, names.TRACE_SPANS},
    Service.GPU_WORKER: {
        names.ATTEND_RECALL,
        names.ATTEND_UNITS,
        names.CONTROLLER_CONNECTED,
        names.DECODE_TOKENS,
        names.EVICTED_SEGMENTS,
        names.INDEX_CAPACITY,
        names.ITL,
        names.LOST_SEGMENTS,
        names.MOVED_BYTES,
        names.MOVE_DURATION,
        names.MOVES,
        names.OFFLOAD_WORKERS,
        names.PAGE_CACHE_CAPACITY,
        names.PAGE_CACHE_TAKEN,
        names.PREFILL_TOKENS,
        names.PREFIX_HIT_TOKENS,
        names.REQUESTS,
        names.RETRIEVAL_READ_BYTES,
        names.SEGMENTS_CACHED,
        names.TIER_CAPACITY,
        names.TIER_USED,
        names.TRACE_SPANS,
        names.TTFT,
    },
    Service.NVME_IO: {
        names.CONTROLLER_CONNECTED,
        names.CORRUPT_SLABS,
        names.HOST_ACCESS,
        names.IO_BACKEND,
        names.LEASED_UNITS,
        names.READ_BYTES,
        names.REGION_HOLDERS,
        names.REGION_SIZE,
        names.TIER_CAPACITY,
        names.TIER_USED,
        names.WRITTEN_BYTES,
    },
    Service.ANN_OFFLOAD: {
        names.CONTROLLER_CONNECTED,
        names.OFFLOAD_BUSY,
        names.OFFLOAD_READ_BYTES,
        names.OFFLOAD_UNITS,
        names.TRACE_SPANS,
    },
    Service.MIGRATION_CONTROLLER: {
        names.COMMANDS,
        names.DECISIONS,
        names.DECISION_DURATION,
        names.HOLDS,
        names.PROCESS_RESTARTS,
        names.REPORTING_PROCESSES,
        names.REPORTS,
        names.TRACE_SPANS,
    },
}
"""What the requests here must have moved away from zero."""

DOCUMENTS = [f"{number}. " + f"All work and no play makes Jack{number} a dull boy. " * 30 for number in range(12)]
"""Of some 1,400 tokens each: one to a byte. All of them are more than HOST and the cold store hold."""


def work(node: WholeNode) -> None:
    """Use every part: prompts that are new, in HOST, in the cold store alone; too many for it; damaged there."""
    node.complete(DOCUMENTS[0], tokens=40)
    node.complete(DOCUMENTS[0], tokens=40)
    until(lambda: node.page(Service.MIGRATION_CONTROLLER).total(names.DECISIONS) > 0, "a decision")
    until(lambda: node.page(Service.MIGRATION_CONTROLLER).total(names.COMMANDS) > 0, "the end of a command")
    for document in DOCUMENTS[1:]:
        node.complete(document, tokens=8)
    for document in reversed(DOCUMENTS[-3:]):
        node.complete(f"{document}And then?", tokens=40)


def damage_store(node: WholeNode) -> None:
    """Flip a byte in every page of the cold store, and ask for what lies there."""
    with node.store.open("r+b") as file:
        size_bytes = file.seek(0, os.SEEK_END)
        for offset in range(1 << 20, size_bytes, 4096):
            file.seek(offset)
            byte = file.read(1)
            file.seek(offset)
            file.write(bytes([byte[0] ^ 0xFF]))
        file.flush()
        os.fsync(file.fileno())


def lose_a_segment(node: WholeNode) -> bool:
    for document in reversed(DOCUMENTS):
        node.complete(f"{document}What else?", tokens=8)
    return node.page(Service.GPU_WORKER).total(names.LOST_SEGMENTS) > 0


def unused(node: WholeNode) -> list[tuple[Service, str]]:
    """Metrics that should have moved and did not, over all processes of a service."""
    pages = node.pages()
    return [
        (service, name)
        for service, wanted in USED.items()
        for name in sorted(wanted)
        if not any(page.total(name) > 0 for process, page in pages.items() if service_of(process) is service)
    ]


def service_of(process: str) -> Service:
    return Service(process.partition("-")[0])


def test_every_declared_metric_appears_and_nothing_undeclared_does(node: WholeNode) -> None:
    work(node)
    damage_store(node)
    until(lambda: lose_a_segment(node), "a segment that cannot be read")
    helper = node.pid_of("ann_offload-0")
    assert helper is not None
    os.kill(helper, signal.SIGKILL)
    until(lambda: node.pid_of("ann_offload-0") not in {None, helper}, "ann_offload again")
    until(lambda: node.page(Service.MIGRATION_CONTROLLER).total(names.PROCESS_RESTARTS) > 0, "the restart to be seen")
    node.complete(DOCUMENTS[0], tokens=40)

    turns = itertools.count()

    def is_all_there() -> bool:
        # What is still missing is measured of requests, not of time.
        turn = next(turns)
        node.complete(f"{DOCUMENTS[turn % len(DOCUMENTS)]}And {turn}?", tokens=40)
        return not lacking(node) and not unused(node)

    until(is_all_there, lambda: (lacking(node), unused(node)))
    pages = node.pages()
    assert {service_of(name) for name in pages} == set(Service)
    for name, page in pages.items():
        declared = {metric.name for metric in METRICS.values() if service_of(name) in metric.services}
        assert page.described == declared, f"{name}: {page.described ^ declared}"
        strange = [each for each in page.samples if each not in declared]
        assert not strange, f"{name} shows what is not declared: {strange}"


def lacking(node: WholeNode) -> list[tuple[str, str]]:
    """Declared metrics without any value, by process."""
    return [
        (name, metric.name)
        for name, page in node.pages().items()
        for metric in METRICS.values()
        if service_of(name) in metric.services and metric.name not in ABSENT_HERE and not page.has_value(metric.name)
    ]
