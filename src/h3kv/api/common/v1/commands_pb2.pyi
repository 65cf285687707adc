# Written by tools/genproto.py from proto/h3kv/api/common/v1/commands.proto. Do not edit: run `make proto`.
from h3kv.api.common.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Outcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    OUTCOME_UNSPECIFIED: _ClassVar[Outcome]
    OUTCOME_DONE: _ClassVar[Outcome]
    OUTCOME_RELAYED: _ClassVar[Outcome]
    OUTCOME_STARTED: _ClassVar[Outcome]
    OUTCOME_STALE: _ClassVar[Outcome]
    OUTCOME_UNKNOWN_SEGMENT: _ClassVar[Outcome]
    OUTCOME_BUSY: _ClassVar[Outcome]
    OUTCOME_NO_ROOM: _ClassVar[Outcome]
    OUTCOME_EXPIRED: _ClassVar[Outcome]
    OUTCOME_FAILED: _ClassVar[Outcome]
OUTCOME_UNSPECIFIED: Outcome
OUTCOME_DONE: Outcome
OUTCOME_RELAYED: Outcome
OUTCOME_STARTED: Outcome
OUTCOME_STALE: Outcome
OUTCOME_UNKNOWN_SEGMENT: Outcome
OUTCOME_BUSY: Outcome
OUTCOME_NO_ROOM: Outcome
OUTCOME_EXPIRED: Outcome
OUTCOME_FAILED: Outcome

class CommandId(_message.Message):
    __slots__ = ("sender_boot_token", "number")
    SENDER_BOOT_TOKEN_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    sender_boot_token: bytes
    number: int
    def __init__(self, sender_boot_token: _Optional[bytes] = ..., number: _Optional[int] = ...) -> None: ...

class Command(_message.Message):
    __slots__ = ("id", "segment", "timeout_ns", "reason")
    ID_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_NS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    id: CommandId
    segment: _types_pb2.SegmentRef
    timeout_ns: int
    reason: str
    def __init__(self, id: _Optional[_Union[CommandId, _Mapping]] = ..., segment: _Optional[_Union[_types_pb2.SegmentRef, _Mapping]] = ..., timeout_ns: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class CommandOutcome(_message.Message):
    __slots__ = ("id", "outcome", "error_reason", "generation", "tiers")
    ID_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    ERROR_REASON_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    id: CommandId
    outcome: Outcome
    error_reason: str
    generation: int
    tiers: _containers.RepeatedScalarFieldContainer[_types_pb2.Tier]
    def __init__(self, id: _Optional[_Union[CommandId, _Mapping]] = ..., outcome: _Optional[_Union[Outcome, str]] = ..., error_reason: _Optional[str] = ..., generation: _Optional[int] = ..., tiers: _Optional[_Iterable[_Union[_types_pb2.Tier, str]]] = ...) -> None: ...
