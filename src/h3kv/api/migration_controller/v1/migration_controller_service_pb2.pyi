# Written by tools/genproto.py from proto/h3kv/api/migration_controller/v1/migration_controller_service.proto. Do not edit: run `make proto`.
from h3kv.api.common.v1 import commands_pb2 as _commands_pb2
from h3kv.api.common.v1 import statistics_pb2 as _statistics_pb2
from h3kv.api.common.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SnapshotStep(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SNAPSHOT_STEP_UNSPECIFIED: _ClassVar[SnapshotStep]
    SNAPSHOT_STEP_BEGIN: _ClassVar[SnapshotStep]
    SNAPSHOT_STEP_PART: _ClassVar[SnapshotStep]
    SNAPSHOT_STEP_END: _ClassVar[SnapshotStep]
    SNAPSHOT_STEP_WHOLE: _ClassVar[SnapshotStep]

class Direction(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DIRECTION_UNSPECIFIED: _ClassVar[Direction]
    DIRECTION_PROMOTE: _ClassVar[Direction]
    DIRECTION_DEMOTE: _ClassVar[Direction]
SNAPSHOT_STEP_UNSPECIFIED: SnapshotStep
SNAPSHOT_STEP_BEGIN: SnapshotStep
SNAPSHOT_STEP_PART: SnapshotStep
SNAPSHOT_STEP_END: SnapshotStep
SNAPSHOT_STEP_WHOLE: SnapshotStep
DIRECTION_UNSPECIFIED: Direction
DIRECTION_PROMOTE: Direction
DIRECTION_DEMOTE: Direction

class Bandwidth(_message.Message):
    __slots__ = ("tier", "read_bytes_per_s", "write_bytes_per_s")
    TIER_FIELD_NUMBER: _ClassVar[int]
    READ_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    WRITE_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    tier: _types_pb2.Tier
    read_bytes_per_s: int
    write_bytes_per_s: int
    def __init__(self, tier: _Optional[_Union[_types_pb2.Tier, str]] = ..., read_bytes_per_s: _Optional[int] = ..., write_bytes_per_s: _Optional[int] = ...) -> None: ...

class HostAccess(_message.Message):
    __slots__ = ("mean_ns", "jitter_ns")
    MEAN_NS_FIELD_NUMBER: _ClassVar[int]
    JITTER_NS_FIELD_NUMBER: _ClassVar[int]
    mean_ns: float
    jitter_ns: float
    def __init__(self, mean_ns: _Optional[float] = ..., jitter_ns: _Optional[float] = ...) -> None: ...

class Touch(_message.Message):
    __slots__ = ("segment", "attention_mass")
    SEGMENT_FIELD_NUMBER: _ClassVar[int]
    ATTENTION_MASS_FIELD_NUMBER: _ClassVar[int]
    segment: _types_pb2.SegmentRef
    attention_mass: float
    def __init__(self, segment: _Optional[_Union[_types_pb2.SegmentRef, _Mapping]] = ..., attention_mass: _Optional[float] = ...) -> None: ...

class SegmentState(_message.Message):
    __slots__ = ("segment", "parent", "blocks", "size_bytes", "tiers", "pins")
    SEGMENT_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    PINS_FIELD_NUMBER: _ClassVar[int]
    segment: _types_pb2.SegmentRef
    parent: bytes
    blocks: int
    size_bytes: int
    tiers: _containers.RepeatedScalarFieldContainer[_types_pb2.Tier]
    pins: int
    def __init__(self, segment: _Optional[_Union[_types_pb2.SegmentRef, _Mapping]] = ..., parent: _Optional[bytes] = ..., blocks: _Optional[int] = ..., size_bytes: _Optional[int] = ..., tiers: _Optional[_Iterable[_Union[_types_pb2.Tier, str]]] = ..., pins: _Optional[int] = ...) -> None: ...

class ReportTelemetryRequest(_message.Message):
    __slots__ = ("process", "report", "made_ns", "snapshot", "tiers", "bandwidths", "host_access", "ring_depth", "touches", "segments", "gone", "outcomes", "room_needed", "tick")
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    MADE_NS_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    BANDWIDTHS_FIELD_NUMBER: _ClassVar[int]
    HOST_ACCESS_FIELD_NUMBER: _ClassVar[int]
    RING_DEPTH_FIELD_NUMBER: _ClassVar[int]
    TOUCHES_FIELD_NUMBER: _ClassVar[int]
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    GONE_FIELD_NUMBER: _ClassVar[int]
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    ROOM_NEEDED_FIELD_NUMBER: _ClassVar[int]
    TICK_FIELD_NUMBER: _ClassVar[int]
    process: _types_pb2.ProcessIdentity
    report: int
    made_ns: int
    snapshot: SnapshotStep
    tiers: _containers.RepeatedCompositeFieldContainer[_statistics_pb2.TierStatistics]
    bandwidths: _containers.RepeatedCompositeFieldContainer[Bandwidth]
    host_access: HostAccess
    ring_depth: int
    touches: _containers.RepeatedCompositeFieldContainer[Touch]
    segments: _containers.RepeatedCompositeFieldContainer[SegmentState]
    gone: _containers.RepeatedScalarFieldContainer[int]
    outcomes: _containers.RepeatedCompositeFieldContainer[_commands_pb2.CommandOutcome]
    room_needed: _containers.RepeatedCompositeFieldContainer[RoomNeeded]
    tick: int
    def __init__(self, process: _Optional[_Union[_types_pb2.ProcessIdentity, _Mapping]] = ..., report: _Optional[int] = ..., made_ns: _Optional[int] = ..., snapshot: _Optional[_Union[SnapshotStep, str]] = ..., tiers: _Optional[_Iterable[_Union[_statistics_pb2.TierStatistics, _Mapping]]] = ..., bandwidths: _Optional[_Iterable[_Union[Bandwidth, _Mapping]]] = ..., host_access: _Optional[_Union[HostAccess, _Mapping]] = ..., ring_depth: _Optional[int] = ..., touches: _Optional[_Iterable[_Union[Touch, _Mapping]]] = ..., segments: _Optional[_Iterable[_Union[SegmentState, _Mapping]]] = ..., gone: _Optional[_Iterable[int]] = ..., outcomes: _Optional[_Iterable[_Union[_commands_pb2.CommandOutcome, _Mapping]]] = ..., room_needed: _Optional[_Iterable[_Union[RoomNeeded, _Mapping]]] = ..., tick: _Optional[int] = ...) -> None: ...

class RoomNeeded(_message.Message):
    __slots__ = ("tier", "size_bytes")
    TIER_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    tier: _types_pb2.Tier
    size_bytes: int
    def __init__(self, tier: _Optional[_Union[_types_pb2.Tier, str]] = ..., size_bytes: _Optional[int] = ...) -> None: ...

class ReportTelemetryResponse(_message.Message):
    __slots__ = ("reports",)
    REPORTS_FIELD_NUMBER: _ClassVar[int]
    reports: int
    def __init__(self, reports: _Optional[int] = ...) -> None: ...

class ProcessView(_message.Message):
    __slots__ = ("process", "is_reporting", "report", "received_ns")
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    IS_REPORTING_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_NS_FIELD_NUMBER: _ClassVar[int]
    process: _types_pb2.ProcessIdentity
    is_reporting: bool
    report: int
    received_ns: int
    def __init__(self, process: _Optional[_Union[_types_pb2.ProcessIdentity, _Mapping]] = ..., is_reporting: _Optional[bool] = ..., report: _Optional[int] = ..., received_ns: _Optional[int] = ...) -> None: ...

class SegmentView(_message.Message):
    __slots__ = ("state", "touches_in_a_row", "touched_ns")
    STATE_FIELD_NUMBER: _ClassVar[int]
    TOUCHES_IN_A_ROW_FIELD_NUMBER: _ClassVar[int]
    TOUCHED_NS_FIELD_NUMBER: _ClassVar[int]
    state: SegmentState
    touches_in_a_row: int
    touched_ns: int
    def __init__(self, state: _Optional[_Union[SegmentState, _Mapping]] = ..., touches_in_a_row: _Optional[int] = ..., touched_ns: _Optional[int] = ...) -> None: ...

class GetViewRequest(_message.Message):
    __slots__ = ("page_size", "page_token")
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    page_size: int
    page_token: str
    def __init__(self, page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class GetViewResponse(_message.Message):
    __slots__ = ("server", "processes", "tiers", "host_access", "segments_total", "segments", "next_page_token")
    SERVER_FIELD_NUMBER: _ClassVar[int]
    PROCESSES_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    HOST_ACCESS_FIELD_NUMBER: _ClassVar[int]
    SEGMENTS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    server: _types_pb2.ProcessIdentity
    processes: _containers.RepeatedCompositeFieldContainer[ProcessView]
    tiers: _containers.RepeatedCompositeFieldContainer[_statistics_pb2.TierStatistics]
    host_access: HostAccess
    segments_total: int
    segments: _containers.RepeatedCompositeFieldContainer[SegmentView]
    next_page_token: str
    def __init__(self, server: _Optional[_Union[_types_pb2.ProcessIdentity, _Mapping]] = ..., processes: _Optional[_Iterable[_Union[ProcessView, _Mapping]]] = ..., tiers: _Optional[_Iterable[_Union[_statistics_pb2.TierStatistics, _Mapping]]] = ..., host_access: _Optional[_Union[HostAccess, _Mapping]] = ..., segments_total: _Optional[int] = ..., segments: _Optional[_Iterable[_Union[SegmentView, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class Decision(_message.Message):
    __slots__ = ("decision", "made_ns", "direction", "source", "target", "command", "outcome")
    DECISION_FIELD_NUMBER: _ClassVar[int]
    MADE_NS_FIELD_NUMBER: _ClassVar[int]
    DIRECTION_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    COMMAND_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    decision: int
    made_ns: int
    direction: Direction
    source: _types_pb2.Tier
    target: _types_pb2.Tier
    command: _commands_pb2.Command
    outcome: _commands_pb2.CommandOutcome
    def __init__(self, decision: _Optional[int] = ..., made_ns: _Optional[int] = ..., direction: _Optional[_Union[Direction, str]] = ..., source: _Optional[_Union[_types_pb2.Tier, str]] = ..., target: _Optional[_Union[_types_pb2.Tier, str]] = ..., command: _Optional[_Union[_commands_pb2.Command, _Mapping]] = ..., outcome: _Optional[_Union[_commands_pb2.CommandOutcome, _Mapping]] = ...) -> None: ...

class GetDecisionsRequest(_message.Message):
    __slots__ = ("after_decision", "count")
    AFTER_DECISION_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    after_decision: int
    count: int
    def __init__(self, after_decision: _Optional[int] = ..., count: _Optional[int] = ...) -> None: ...

class GetDecisionsResponse(_message.Message):
    __slots__ = ("decisions", "totals", "held_totals")
    class TotalsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class HeldTotalsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    DECISIONS_FIELD_NUMBER: _ClassVar[int]
    TOTALS_FIELD_NUMBER: _ClassVar[int]
    HELD_TOTALS_FIELD_NUMBER: _ClassVar[int]
    decisions: _containers.RepeatedCompositeFieldContainer[Decision]
    totals: _containers.ScalarMap[str, int]
    held_totals: _containers.ScalarMap[str, int]
    def __init__(self, decisions: _Optional[_Iterable[_Union[Decision, _Mapping]]] = ..., totals: _Optional[_Mapping[str, int]] = ..., held_totals: _Optional[_Mapping[str, int]] = ...) -> None: ...
