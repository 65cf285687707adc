# Written by tools/genproto.py from proto/h3kv/api/common/v1/statistics.proto. Do not edit: run `make proto`.
from h3kv.api.common.v1 import types_pb2 as _types_pb2
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class TierStatistics(_message.Message):
    __slots__ = ("tier", "capacity_bytes", "used_bytes", "pinned_bytes", "slabs_visible", "moves_total", "bytes_moved_total")
    TIER_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_BYTES_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    PINNED_BYTES_FIELD_NUMBER: _ClassVar[int]
    SLABS_VISIBLE_FIELD_NUMBER: _ClassVar[int]
    MOVES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    BYTES_MOVED_TOTAL_FIELD_NUMBER: _ClassVar[int]
    tier: _types_pb2.Tier
    capacity_bytes: int
    used_bytes: int
    pinned_bytes: int
    slabs_visible: int
    moves_total: int
    bytes_moved_total: int
    def __init__(self, tier: _Optional[_Union[_types_pb2.Tier, str]] = ..., capacity_bytes: _Optional[int] = ..., used_bytes: _Optional[int] = ..., pinned_bytes: _Optional[int] = ..., slabs_visible: _Optional[int] = ..., moves_total: _Optional[int] = ..., bytes_moved_total: _Optional[int] = ...) -> None: ...

class IoStatistics(_message.Message):
    __slots__ = ("backend", "fallback_reason", "ring_depth", "ring_depth_max", "read_bytes_total", "written_bytes_total", "errors_total", "retries_total", "is_degraded")
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    FALLBACK_REASON_FIELD_NUMBER: _ClassVar[int]
    RING_DEPTH_FIELD_NUMBER: _ClassVar[int]
    RING_DEPTH_MAX_FIELD_NUMBER: _ClassVar[int]
    READ_BYTES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    WRITTEN_BYTES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    ERRORS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    RETRIES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    IS_DEGRADED_FIELD_NUMBER: _ClassVar[int]
    backend: str
    fallback_reason: str
    ring_depth: int
    ring_depth_max: int
    read_bytes_total: int
    written_bytes_total: int
    errors_total: int
    retries_total: int
    is_degraded: bool
    def __init__(self, backend: _Optional[str] = ..., fallback_reason: _Optional[str] = ..., ring_depth: _Optional[int] = ..., ring_depth_max: _Optional[int] = ..., read_bytes_total: _Optional[int] = ..., written_bytes_total: _Optional[int] = ..., errors_total: _Optional[int] = ..., retries_total: _Optional[int] = ..., is_degraded: _Optional[bool] = ...) -> None: ...

class MailboxStatistics(_message.Message):
    __slots__ = ("depth", "depth_max", "requests_total", "timeouts_total")
    DEPTH_FIELD_NUMBER: _ClassVar[int]
    DEPTH_MAX_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    TIMEOUTS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    depth: int
    depth_max: int
    requests_total: int
    timeouts_total: int
    def __init__(self, depth: _Optional[int] = ..., depth_max: _Optional[int] = ..., requests_total: _Optional[int] = ..., timeouts_total: _Optional[int] = ...) -> None: ...
