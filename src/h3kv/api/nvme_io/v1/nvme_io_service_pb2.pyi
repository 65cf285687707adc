# Written by tools/genproto.py from proto/h3kv/api/nvme_io/v1/nvme_io_service.proto. Do not edit: run `make proto`.
from h3kv.api.common.v1 import commands_pb2 as _commands_pb2
from h3kv.api.common.v1 import statistics_pb2 as _statistics_pb2
from h3kv.api.common.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Layout(_message.Message):
    __slots__ = ("fingerprint", "layers", "block_bytes", "index_bytes", "check_bytes", "element_bytes", "encoding", "layout_version")
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    INDEX_BYTES_FIELD_NUMBER: _ClassVar[int]
    CHECK_BYTES_FIELD_NUMBER: _ClassVar[int]
    ELEMENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    ENCODING_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_VERSION_FIELD_NUMBER: _ClassVar[int]
    fingerprint: bytes
    layers: int
    block_bytes: int
    index_bytes: int
    check_bytes: int
    element_bytes: int
    encoding: str
    layout_version: int
    def __init__(self, fingerprint: _Optional[bytes] = ..., layers: _Optional[int] = ..., block_bytes: _Optional[int] = ..., index_bytes: _Optional[int] = ..., check_bytes: _Optional[int] = ..., element_bytes: _Optional[int] = ..., encoding: _Optional[str] = ..., layout_version: _Optional[int] = ...) -> None: ...

class UnitRun(_message.Message):
    __slots__ = ("first_unit", "count")
    FIRST_UNIT_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    first_unit: int
    count: int
    def __init__(self, first_unit: _Optional[int] = ..., count: _Optional[int] = ...) -> None: ...

class StoredSegment(_message.Message):
    __slots__ = ("segment", "keys", "parent", "slots")
    SEGMENT_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    segment: _types_pb2.SegmentRef
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    parent: bytes
    slots: _containers.RepeatedCompositeFieldContainer[_types_pb2.Slot]
    def __init__(self, segment: _Optional[_Union[_types_pb2.SegmentRef, _Mapping]] = ..., keys: _Optional[_Iterable[bytes]] = ..., parent: _Optional[bytes] = ..., slots: _Optional[_Iterable[_Union[_types_pb2.Slot, _Mapping]]] = ...) -> None: ...

class ClientStatistics(_message.Message):
    __slots__ = ("client_id", "name", "leased_units", "pins")
    CLIENT_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    LEASED_UNITS_FIELD_NUMBER: _ClassVar[int]
    PINS_FIELD_NUMBER: _ClassVar[int]
    client_id: int
    name: str
    leased_units: int
    pins: int
    def __init__(self, client_id: _Optional[int] = ..., name: _Optional[str] = ..., leased_units: _Optional[int] = ..., pins: _Optional[int] = ...) -> None: ...

class RegisterRequest(_message.Message):
    __slots__ = ("client", "client_id", "layout")
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    CLIENT_ID_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    client: _types_pb2.ProcessIdentity
    client_id: int
    layout: Layout
    def __init__(self, client: _Optional[_Union[_types_pb2.ProcessIdentity, _Mapping]] = ..., client_id: _Optional[int] = ..., layout: _Optional[_Union[Layout, _Mapping]] = ...) -> None: ...

class RegisterResponse(_message.Message):
    __slots__ = ("server", "regions", "layout", "host_units", "index_slots", "cold_capacity_bytes")
    SERVER_FIELD_NUMBER: _ClassVar[int]
    REGIONS_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    HOST_UNITS_FIELD_NUMBER: _ClassVar[int]
    INDEX_SLOTS_FIELD_NUMBER: _ClassVar[int]
    COLD_CAPACITY_BYTES_FIELD_NUMBER: _ClassVar[int]
    server: _types_pb2.ProcessIdentity
    regions: _containers.RepeatedCompositeFieldContainer[_types_pb2.RegionDescription]
    layout: Layout
    host_units: int
    index_slots: int
    cold_capacity_bytes: int
    def __init__(self, server: _Optional[_Union[_types_pb2.ProcessIdentity, _Mapping]] = ..., regions: _Optional[_Iterable[_Union[_types_pb2.RegionDescription, _Mapping]]] = ..., layout: _Optional[_Union[Layout, _Mapping]] = ..., host_units: _Optional[int] = ..., index_slots: _Optional[int] = ..., cold_capacity_bytes: _Optional[int] = ...) -> None: ...

class LeaseUnitsRequest(_message.Message):
    __slots__ = ("client_id", "lease_id", "count")
    CLIENT_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    client_id: int
    lease_id: int
    count: int
    def __init__(self, client_id: _Optional[int] = ..., lease_id: _Optional[int] = ..., count: _Optional[int] = ...) -> None: ...

class LeaseUnitsResponse(_message.Message):
    __slots__ = ("units", "free_units")
    UNITS_FIELD_NUMBER: _ClassVar[int]
    FREE_UNITS_FIELD_NUMBER: _ClassVar[int]
    units: _containers.RepeatedCompositeFieldContainer[UnitRun]
    free_units: int
    def __init__(self, units: _Optional[_Iterable[_Union[UnitRun, _Mapping]]] = ..., free_units: _Optional[int] = ...) -> None: ...

class ReturnUnitsRequest(_message.Message):
    __slots__ = ("client_id", "units")
    CLIENT_ID_FIELD_NUMBER: _ClassVar[int]
    UNITS_FIELD_NUMBER: _ClassVar[int]
    client_id: int
    units: _containers.RepeatedCompositeFieldContainer[UnitRun]
    def __init__(self, client_id: _Optional[int] = ..., units: _Optional[_Iterable[_Union[UnitRun, _Mapping]]] = ...) -> None: ...

class ReturnUnitsResponse(_message.Message):
    __slots__ = ("count",)
    COUNT_FIELD_NUMBER: _ClassVar[int]
    count: int
    def __init__(self, count: _Optional[int] = ...) -> None: ...

class ListStoredRequest(_message.Message):
    __slots__ = ("client_id", "page_size", "page_token")
    CLIENT_ID_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    client_id: int
    page_size: int
    page_token: str
    def __init__(self, client_id: _Optional[int] = ..., page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListStoredResponse(_message.Message):
    __slots__ = ("segments", "next_page_token")
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    segments: _containers.RepeatedCompositeFieldContainer[StoredSegment]
    next_page_token: str
    def __init__(self, segments: _Optional[_Iterable[_Union[StoredSegment, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class GetStatisticsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetStatisticsResponse(_message.Message):
    __slots__ = ("server", "tiers", "io", "regions", "clients", "mailbox")
    SERVER_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    IO_FIELD_NUMBER: _ClassVar[int]
    REGIONS_FIELD_NUMBER: _ClassVar[int]
    CLIENTS_FIELD_NUMBER: _ClassVar[int]
    MAILBOX_FIELD_NUMBER: _ClassVar[int]
    server: _types_pb2.ProcessIdentity
    tiers: _containers.RepeatedCompositeFieldContainer[_statistics_pb2.TierStatistics]
    io: _statistics_pb2.IoStatistics
    regions: _containers.RepeatedCompositeFieldContainer[_types_pb2.RegionDescription]
    clients: _containers.RepeatedCompositeFieldContainer[ClientStatistics]
    mailbox: _statistics_pb2.MailboxStatistics
    def __init__(self, server: _Optional[_Union[_types_pb2.ProcessIdentity, _Mapping]] = ..., tiers: _Optional[_Iterable[_Union[_statistics_pb2.TierStatistics, _Mapping]]] = ..., io: _Optional[_Union[_statistics_pb2.IoStatistics, _Mapping]] = ..., regions: _Optional[_Iterable[_Union[_types_pb2.RegionDescription, _Mapping]]] = ..., clients: _Optional[_Iterable[_Union[ClientStatistics, _Mapping]]] = ..., mailbox: _Optional[_Union[_statistics_pb2.MailboxStatistics, _Mapping]] = ...) -> None: ...

class PromoteRequest(_message.Message):
    __slots__ = ("commands",)
    COMMANDS_FIELD_NUMBER: _ClassVar[int]
    commands: _containers.RepeatedCompositeFieldContainer[_commands_pb2.Command]
    def __init__(self, commands: _Optional[_Iterable[_Union[_commands_pb2.Command, _Mapping]]] = ...) -> None: ...

class PromoteResponse(_message.Message):
    __slots__ = ("outcomes",)
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    outcomes: _containers.RepeatedCompositeFieldContainer[_commands_pb2.CommandOutcome]
    def __init__(self, outcomes: _Optional[_Iterable[_Union[_commands_pb2.CommandOutcome, _Mapping]]] = ...) -> None: ...

class DemoteRequest(_message.Message):
    __slots__ = ("commands",)
    COMMANDS_FIELD_NUMBER: _ClassVar[int]
    commands: _containers.RepeatedCompositeFieldContainer[_commands_pb2.Command]
    def __init__(self, commands: _Optional[_Iterable[_Union[_commands_pb2.Command, _Mapping]]] = ...) -> None: ...

class DemoteResponse(_message.Message):
    __slots__ = ("outcomes",)
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    outcomes: _containers.RepeatedCompositeFieldContainer[_commands_pb2.CommandOutcome]
    def __init__(self, outcomes: _Optional[_Iterable[_Union[_commands_pb2.CommandOutcome, _Mapping]]] = ...) -> None: ...

class EvictColdRequest(_message.Message):
    __slots__ = ("idle_ns", "size_bytes")
    IDLE_NS_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    idle_ns: int
    size_bytes: int
    def __init__(self, idle_ns: _Optional[int] = ..., size_bytes: _Optional[int] = ...) -> None: ...

class EvictColdResponse(_message.Message):
    __slots__ = ("segments", "size_bytes")
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    segments: int
    size_bytes: int
    def __init__(self, segments: _Optional[int] = ..., size_bytes: _Optional[int] = ...) -> None: ...

class WatchMovesRequest(_message.Message):
    __slots__ = ("client_id", "after_event")
    CLIENT_ID_FIELD_NUMBER: _ClassVar[int]
    AFTER_EVENT_FIELD_NUMBER: _ClassVar[int]
    client_id: int
    after_event: int
    def __init__(self, client_id: _Optional[int] = ..., after_event: _Optional[int] = ...) -> None: ...

class WatchMovesResponse(_message.Message):
    __slots__ = ("event", "command", "move")
    EVENT_FIELD_NUMBER: _ClassVar[int]
    COMMAND_FIELD_NUMBER: _ClassVar[int]
    MOVE_FIELD_NUMBER: _ClassVar[int]
    event: int
    command: RelayedCommand
    move: MoveEnded
    def __init__(self, event: _Optional[int] = ..., command: _Optional[_Union[RelayedCommand, _Mapping]] = ..., move: _Optional[_Union[MoveEnded, _Mapping]] = ...) -> None: ...

class RelayedCommand(_message.Message):
    __slots__ = ("command", "source", "target")
    COMMAND_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    command: _commands_pb2.Command
    source: _types_pb2.Tier
    target: _types_pb2.Tier
    def __init__(self, command: _Optional[_Union[_commands_pb2.Command, _Mapping]] = ..., source: _Optional[_Union[_types_pb2.Tier, str]] = ..., target: _Optional[_Union[_types_pb2.Tier, str]] = ...) -> None: ...

class MoveEnded(_message.Message):
    __slots__ = ("segment", "source", "target", "size_bytes", "outcome", "reason", "duration_ns")
    SEGMENT_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    DURATION_NS_FIELD_NUMBER: _ClassVar[int]
    segment: _types_pb2.SegmentRef
    source: _types_pb2.Tier
    target: _types_pb2.Tier
    size_bytes: int
    outcome: _commands_pb2.CommandOutcome
    reason: str
    duration_ns: int
    def __init__(self, segment: _Optional[_Union[_types_pb2.SegmentRef, _Mapping]] = ..., source: _Optional[_Union[_types_pb2.Tier, str]] = ..., target: _Optional[_Union[_types_pb2.Tier, str]] = ..., size_bytes: _Optional[int] = ..., outcome: _Optional[_Union[_commands_pb2.CommandOutcome, _Mapping]] = ..., reason: _Optional[str] = ..., duration_ns: _Optional[int] = ...) -> None: ...

class ReportOutcomeRequest(_message.Message):
    __slots__ = ("client_id", "moves")
    CLIENT_ID_FIELD_NUMBER: _ClassVar[int]
    MOVES_FIELD_NUMBER: _ClassVar[int]
    client_id: int
    moves: _containers.RepeatedCompositeFieldContainer[MoveEnded]
    def __init__(self, client_id: _Optional[int] = ..., moves: _Optional[_Iterable[_Union[MoveEnded, _Mapping]]] = ...) -> None: ...

class ReportOutcomeResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
