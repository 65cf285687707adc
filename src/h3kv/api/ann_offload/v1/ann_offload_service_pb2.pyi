# Written by tools/genproto.py from proto/h3kv/api/ann_offload/v1/ann_offload_service.proto. Do not edit: run `make proto`.
from h3kv.api.common.v1 import statistics_pb2 as _statistics_pb2
from h3kv.api.common.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Phase(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PHASE_UNSPECIFIED: _ClassVar[Phase]
    PHASE_STARTING: _ClassVar[Phase]
    PHASE_SERVING: _ClassVar[Phase]
    PHASE_DRAINED: _ClassVar[Phase]
PHASE_UNSPECIFIED: Phase
PHASE_STARTING: Phase
PHASE_SERVING: Phase
PHASE_DRAINED: Phase

class GetStatisticsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetStatisticsResponse(_message.Message):
    __slots__ = ("server", "phase", "threads", "units_in_flight", "units_total", "units_refused_total", "read_bytes_total", "seals_total", "busy_ns_total", "mailbox")
    SERVER_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    THREADS_FIELD_NUMBER: _ClassVar[int]
    UNITS_IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    UNITS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    UNITS_REFUSED_TOTAL_FIELD_NUMBER: _ClassVar[int]
    READ_BYTES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    SEALS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    BUSY_NS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    MAILBOX_FIELD_NUMBER: _ClassVar[int]
    server: _types_pb2.ProcessIdentity
    phase: Phase
    threads: int
    units_in_flight: int
    units_total: int
    units_refused_total: int
    read_bytes_total: int
    seals_total: int
    busy_ns_total: int
    mailbox: _statistics_pb2.MailboxStatistics
    def __init__(self, server: _Optional[_Union[_types_pb2.ProcessIdentity, _Mapping]] = ..., phase: _Optional[_Union[Phase, str]] = ..., threads: _Optional[int] = ..., units_in_flight: _Optional[int] = ..., units_total: _Optional[int] = ..., units_refused_total: _Optional[int] = ..., read_bytes_total: _Optional[int] = ..., seals_total: _Optional[int] = ..., busy_ns_total: _Optional[int] = ..., mailbox: _Optional[_Union[_statistics_pb2.MailboxStatistics, _Mapping]] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ("units_left",)
    UNITS_LEFT_FIELD_NUMBER: _ClassVar[int]
    units_left: int
    def __init__(self, units_left: _Optional[int] = ...) -> None: ...
