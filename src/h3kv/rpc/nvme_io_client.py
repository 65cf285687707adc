"""What a client asks of `nvme_io`: calls of `NvmeIoService`, in the nouns of this process."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from h3kv.api.common.v1 import types_pb2
from h3kv.api.nvme_io.v1 import nvme_io_service_pb2 as pb
from h3kv.api.nvme_io.v1 import nvme_io_service_pb2_grpc as pb_grpc
from h3kv.core.errors import RequestError
from h3kv.core.types import BlockKey, SegmentLabel, SlotHandle, Tier
from h3kv.core.units import NS_PER_S
from h3kv.rpc.client import PeerChannel
from h3kv.rpc.command_messages import EndedCommand, MoveCommand, ended_message, read_relayed
from h3kv.rpc.convert import PAGE_MAX, read_key, read_slot

REGISTER_S = 60.0
"""The store's headers are read before the first answer."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WireLayout:
    """How KV is laid out, as `Layout` in the protocol."""

    fingerprint: bytes
    layers: int
    block_bytes: int
    index_bytes: int
    """Of the index of one layer of a segment, rounded up to 4 KiB; 0: there is none."""
    check_bytes: int
    element_bytes: int
    encoding: str
    layout_version: int


@dataclass(frozen=True, slots=True)
class Registration:
    """What `nvme_io` has for this client."""

    server_boot_token: bytes
    purposes: frozenset[str]
    """Of the regions that it serves."""
    host_units: int
    index_slots: int
    cold_capacity_bytes: int
    """0: there is no cold store."""


@dataclass(frozen=True, slots=True)
class ListedSegment:
    """A segment that the cold store kept."""

    label: SegmentLabel
    handles_L: tuple[SlotHandle, ...]


class CommandStream:
    """Commands for this client as they come, until the stream ends. `cancel` may be called by any thread.

    Args:
        call: of `WatchMoves`.
    """

    def __init__(self, call: Any) -> None:
        self._call = call

    def __iter__(self) -> Iterator[tuple[int, MoveCommand | None]]:
        """The number of each event, and its command; None where it is none, or one that this version cannot read.

        Raises:
            H3Error: the stream broke, or reached its deadline.
        """
        for response in self._call:
            command: MoveCommand | None = None
            if response.HasField("command"):
                try:
                    command = read_relayed(response.command)
                except RequestError as error:
                    _log.warning("a command that cannot be read is passed over: %s", error)
            yield response.event, command

    def cancel(self) -> None:
        """Give the stream up."""
        self._call.cancel()


class NvmeIoClient:
    """Thread-safe.

    Args:
        channel: to `nvme_io`; stays the caller's.
        name: of this process.
        boot_token: 16 random bytes of it.
    """

    def __init__(self, channel: PeerChannel, *, name: str, boot_token: bytes) -> None:
        self._stub = pb_grpc.NvmeIoServiceStub(channel.grpc)
        self._identity = types_pb2.ProcessIdentity(name=name, boot_token=boot_token)
        self.calls_total = 0
        """Calls so far, to see that none is made where none may be."""

    def register(self, holder: int, layout: WireLayout | None) -> Registration:
        """See `Register`. A client without a layout reads regions alone."""
        self.calls_total += 1
        request = pb.RegisterRequest(client=self._identity, client_id=holder)
        if layout is not None:
            request.layout.CopyFrom(layout_message(layout))
        response = self._stub.Register(request, timeout=REGISTER_S)
        return Registration(
            response.server.boot_token,
            frozenset(region.purpose for region in response.regions),
            response.host_units,
            response.index_slots,
            response.cold_capacity_bytes,
        )

    def lease_units(self, holder: int, count: int) -> list[int]:
        """Numbers of so many units of HOST. Raises TierFullError where there are not so many."""
        self.calls_total += 1
        lease_id = secrets.randbits(63) + 1
        response = self._stub.LeaseUnits(pb.LeaseUnitsRequest(client_id=holder, lease_id=lease_id, count=count))
        return [unit for run in response.units for unit in range(run.first_unit, run.first_unit + run.count)]

    def return_units(self, holder: int, units: Sequence[int]) -> None:
        """Give units back in which there is no slot."""
        self.calls_total += 1
        self._stub.ReturnUnits(pb.ReturnUnitsRequest(client_id=holder, units=unit_runs(units)))

    def watch_commands(self, holder: int, after: int | None, *, timeout_ns: int) -> CommandStream:
        """Commands for this client. What is wrong with the call is raised by the stream.

        Args:
            holder: number of this client.
            after: the last event that was seen; 0: from the first on; None: only what comes from now on.
            timeout_ns: of the stream.
        """
        self.calls_total += 1
        request = pb.WatchMovesRequest(client_id=holder, after_event=after)
        return CommandStream(self._stub.WatchMoves(request, timeout=timeout_ns / NS_PER_S))

    def report_ended(self, holder: int, ended: Iterable[EndedCommand]) -> None:
        """Say how commands ended. The first word on each counts."""
        self.calls_total += 1
        moves = [ended_message(each) for each in ended]
        self._stub.ReportOutcome(pb.ReportOutcomeRequest(client_id=holder, moves=moves))

    def list_stored(self, holder: int) -> list[ListedSegment]:
        """What the cold store kept, oldest first: this client's from now on."""
        found: list[ListedSegment] = []
        token = ""
        while True:
            self.calls_total += 1
            request = pb.ListStoredRequest(client_id=holder, page_size=PAGE_MAX, page_token=token)
            response = self._stub.ListStored(request, timeout=REGISTER_S)
            found += [_listed(segment) for segment in response.segments]
            token = response.next_page_token
            if not token:
                return found


def layout_message(layout: WireLayout) -> pb.Layout:
    """A layout as messages write it."""
    return pb.Layout(
        fingerprint=layout.fingerprint,
        layers=layout.layers,
        block_bytes=layout.block_bytes,
        index_bytes=layout.index_bytes,
        check_bytes=layout.check_bytes,
        element_bytes=layout.element_bytes,
        encoding=layout.encoding,
        layout_version=layout.layout_version,
    )


def read_layout(message: pb.Layout) -> WireLayout:
    """The layout in a message, nothing of it checked."""
    return WireLayout(
        message.fingerprint,
        message.layers,
        message.block_bytes,
        message.index_bytes,
        check_bytes=message.check_bytes,
        element_bytes=message.element_bytes,
        encoding=message.encoding,
        layout_version=message.layout_version,
    )


def unit_runs(units: Iterable[int]) -> list[pb.UnitRun]:
    """Units as runs of neighbours."""
    runs: list[pb.UnitRun] = []
    for unit in sorted(units):
        if runs and runs[-1].first_unit + runs[-1].count == unit:
            runs[-1].count += 1
        else:
            runs.append(pb.UnitRun(first_unit=unit, count=1))
    return runs


def _listed(segment: pb.StoredSegment) -> ListedSegment:
    keys = tuple(read_key(key, field="keys") for key in segment.keys)
    parent: BlockKey = read_key(segment.parent, field="parent")
    handles_L = tuple(read_slot(slot, Tier.NVME, field="slots") for slot in segment.slots)
    return ListedSegment(SegmentLabel(keys, parent), handles_L)
