"""The view as `GetView` gives it, page by page in the order of owners and numbers."""

from __future__ import annotations

import heapq
import re
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

from h3kv.api.common.v1 import types_pb2
from h3kv.api.migration_controller.v1 import migration_controller_service_pb2 as pb
from h3kv.core.errors import RequestError
from h3kv.core.types import SegmentId, Tier
from h3kv.policy.migration_state import MigrationState, TrackedSegment
from h3kv.policy.migration_tables import SegmentRef
from h3kv.rpc.reports import ReportedSegment, TierRoom, room_message, segment_message
from services.migration_controller.view import NodeView, ProcessRecord

_TOKEN: Final = re.compile(r"([a-z0-9_.-]{1,63}):(\d{1,20})")


class Place(NamedTuple):
    """The last segment of a page."""

    owner: str
    segment: int


class ViewPages:
    """For the loop's thread, between turns.

    Args:
        view: what processes said.
        state: gives what the rules know.
    """

    def __init__(self, view: NodeView, state: Callable[[], MigrationState]) -> None:
        self._view = view
        self._state = state

    def parse(self, token: str) -> Place | None:
        """Where a page begins. Raises RequestError for a token that none ended with."""
        if not token:
            return None
        found = _TOKEN.fullmatch(token)
        if found is None:
            raise RequestError(f"page_token = {token[:100]!r}: is none of ours: begin without one")
        return Place(found[1], int(found[2]))

    def read(self, size: int, after: Place | None) -> pb.GetViewResponse:
        """A page. Cost: O(segments) where `size` is not 0."""
        records = self._view.processes.values()
        response = pb.GetViewResponse(
            processes=[_process(each) for each in records],
            tiers=[room_message(room) for room in self._rooms()],
            segments_total=self._view.segments_total,
        )
        access = next((each.host_access for each in records if each.host_access is not None), None)
        if access is not None:
            response.host_access.CopyFrom(pb.HostAccess(mean_ns=access.mean_ns, jitter_ns=access.jitter_ns))
        if size > 0:
            page = heapq.nsmallest(size + 1, self._places(after))
            response.segments.extend(self._segment(place) for place in page[:size])
            if len(page) > size:
                response.next_page_token = f"{page[size - 1].owner}:{page[size - 1].segment}"
        return response

    def _rooms(self) -> list[TierRoom]:
        newest: dict[Tier, TierRoom] = {}
        for record in sorted(self._view.processes.values(), key=lambda each: each.received_ns):
            newest.update(record.rooms)
        return list(newest.values())

    def _places(self, after: Place | None) -> Iterator[Place]:
        for name, record in self._view.processes.items():
            for segment in record.segments:
                if after is None or (name, segment) > after:
                    yield Place(name, segment)

    def _segment(self, place: Place) -> pb.SegmentView:
        record = self._view.processes[place.owner]
        known: ReportedSegment = record.segments[SegmentId(place.segment)]
        view = pb.SegmentView(state=segment_message(known, record.process.boot_token))
        tracked = self._tracked(place)
        if tracked is not None:
            view.touches_in_a_row = tracked.touches_in_row
            view.touched_ns = tracked.touched_ns
        return view

    def _tracked(self, place: Place) -> TrackedSegment | None:
        return self._state().segments.get(SegmentRef(place.owner, SegmentId(place.segment)))


def _process(record: ProcessRecord) -> pb.ProcessView:
    return pb.ProcessView(
        process=types_pb2.ProcessIdentity(name=record.process.name, boot_token=record.process.boot_token),
        is_reporting=record.streams > 0,
        report=record.report,
        received_ns=record.received_ns,
    )
