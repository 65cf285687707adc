# Written by tools/genproto.py from proto/h3kv/api/common/v1/types.proto. Do not edit: run `make proto`.
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Tier(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TIER_UNSPECIFIED: _ClassVar[Tier]
    TIER_DEVICE: _ClassVar[Tier]
    TIER_HOST: _ClassVar[Tier]
    TIER_NVME: _ClassVar[Tier]

class RegionKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REGION_KIND_UNSPECIFIED: _ClassVar[RegionKind]
    REGION_KIND_DMA_HEAP: _ClassVar[RegionKind]
    REGION_KIND_HUGETLB: _ClassVar[RegionKind]
    REGION_KIND_MEMFD: _ClassVar[RegionKind]
TIER_UNSPECIFIED: Tier
TIER_DEVICE: Tier
TIER_HOST: Tier
TIER_NVME: Tier
REGION_KIND_UNSPECIFIED: RegionKind
REGION_KIND_DMA_HEAP: RegionKind
REGION_KIND_HUGETLB: RegionKind
REGION_KIND_MEMFD: RegionKind

class ProcessIdentity(_message.Message):
    __slots__ = ("name", "boot_token")
    NAME_FIELD_NUMBER: _ClassVar[int]
    BOOT_TOKEN_FIELD_NUMBER: _ClassVar[int]
    name: str
    boot_token: bytes
    def __init__(self, name: _Optional[str] = ..., boot_token: _Optional[bytes] = ...) -> None: ...

class SegmentRef(_message.Message):
    __slots__ = ("key", "segment", "owner_boot_token", "generation")
    KEY_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_FIELD_NUMBER: _ClassVar[int]
    OWNER_BOOT_TOKEN_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    key: bytes
    segment: int
    owner_boot_token: bytes
    generation: int
    def __init__(self, key: _Optional[bytes] = ..., segment: _Optional[int] = ..., owner_boot_token: _Optional[bytes] = ..., generation: _Optional[int] = ...) -> None: ...

class Slot(_message.Message):
    __slots__ = ("offset_blocks", "blocks", "generation")
    OFFSET_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    offset_blocks: int
    blocks: int
    generation: int
    def __init__(self, offset_blocks: _Optional[int] = ..., blocks: _Optional[int] = ..., generation: _Optional[int] = ...) -> None: ...

class RegionDescription(_message.Message):
    __slots__ = ("region_id", "purpose", "kind", "address", "size_bytes", "boot_token")
    REGION_ID_FIELD_NUMBER: _ClassVar[int]
    PURPOSE_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    BOOT_TOKEN_FIELD_NUMBER: _ClassVar[int]
    region_id: int
    purpose: str
    kind: RegionKind
    address: int
    size_bytes: int
    boot_token: bytes
    def __init__(self, region_id: _Optional[int] = ..., purpose: _Optional[str] = ..., kind: _Optional[_Union[RegionKind, str]] = ..., address: _Optional[int] = ..., size_bytes: _Optional[int] = ..., boot_token: _Optional[bytes] = ...) -> None: ...
