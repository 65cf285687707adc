"""What is remembered of a document, and of one that is being erased: JSON that outlives the process."""

from __future__ import annotations

import enum
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from h3kv.core.hashing import KEY_BYTES
from h3kv.core.reach import Reach
from h3kv.core.types import BlockKey

VERSION: Final = 1
"""Of both kinds of records."""


class State(enum.StrEnum):
    """How far a document is."""

    READING = "reading"
    """Its text is being read, or waits for it."""
    READY = "ready"
    """It was read: prompts find its KV, as far as its room was not needed since."""
    FAILED = "failed"
    """It could not be read; prompts that name it compute it."""


@dataclass(frozen=True, slots=True)
class Owner:
    """A tenant, as a call names it."""

    name: str
    salt: bytes
    tokens_per_minute: int | None = None
    document_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentRecord:
    """A document without its text."""

    id: str
    tenant: str
    """Name of whose it is."""
    salt: bytes
    """Of the keys of its KV."""
    name: str
    created_s: int
    """Seconds since 1970, as the next."""
    expires_s: int | None
    is_pinned: bool
    tokens: int
    """Of the prefix that prompts which name it begin with."""
    keys: tuple[BlockKey, ...] = ()
    """Of the whole blocks of that prefix."""
    state: State = State.READING
    failure: str = ""
    follows: tuple[tuple[str, ...], ...] = ()
    """Documents that stood before it in a chat, each list once: its KV lies there too, under other keys."""
    is_elsewhere: bool = False
    """Whether a chat's prompt did not begin with its documents: its KV may be anywhere that its tenant has some."""

    @property
    def places(self) -> tuple[object, ...]:
        """All that tells where its KV may lie."""
        return self.follows, self.is_elsewhere

    def pack(self) -> bytes:
        """The record as it is kept."""
        fields = {name: getattr(self, name) for name in _DOCUMENT_TYPES}
        fields |= {"version": VERSION, "salt": self.salt.hex(), "keys": b"".join(self.keys).hex()}
        fields["follows"] = [list(ids) for ids in self.follows]
        return json.dumps(fields, indent=1).encode()


@dataclass(frozen=True, slots=True, kw_only=True)
class ErasureRecord:
    """What is left to be erased of a document that was deleted."""

    id: str
    tenant: str
    salt: bytes
    own: tuple[BlockKey, ...]
    """See `core.reach.Reach`."""
    ends: tuple[BlockKey, ...]

    def pack(self) -> bytes:
        """The record as it is kept."""
        fields = {"version": VERSION, "id": self.id, "tenant": self.tenant, "salt": self.salt.hex()}
        keys = {"own": [key.hex() for key in self.own], "ends": [key.hex() for key in self.ends]}
        return json.dumps(fields | keys).encode()


_DOCUMENT_TYPES: Final[Mapping[str, tuple[type, ...]]] = {
    "id": (str,),
    "tenant": (str,),
    "salt": (str,),
    "name": (str,),
    "created_s": (int,),
    "expires_s": (int, type(None)),
    "is_pinned": (bool,),
    "tokens": (int,),
    "keys": (str,),
    "state": (str,),
    "failure": (str,),
    "follows": (list,),
    "is_elsewhere": (bool,),
}
_ERASURE_TYPES: Final[Mapping[str, tuple[type, ...]]] = {
    "id": (str,),
    "tenant": (str,),
    "salt": (str,),
    "own": (list,),
    "ends": (list,),
}


def taken_up(record: DocumentRecord) -> DocumentRecord:
    """What an earlier process kept: where it was ready, its KV is looked for first, since it may have gone."""
    return replace(record, state=State.READING) if record.state is State.READY else record


def erasure_of(record: DocumentRecord, reach: Reach) -> ErasureRecord:
    """What is left to be erased of a document that reaches so far."""
    own, ends = tuple(reach.own), tuple(reach.ends)
    return ErasureRecord(id=record.id, tenant=record.tenant, salt=record.salt, own=own, ends=ends)


def unpack_document(data: bytes) -> DocumentRecord:
    """The record in a file. Raises ValueError for anything else."""
    fields = _fields(data, _DOCUMENT_TYPES)
    follows = tuple(tuple(str(each) for each in ids) for ids in fields["follows"] if isinstance(ids, list))
    salt, state, packed = bytes.fromhex(fields["salt"]), State(fields["state"]), bytes.fromhex(fields["keys"])
    if len(packed) % KEY_BYTES:
        raise ValueError("half a key")
    keys = tuple(BlockKey(packed[at : at + KEY_BYTES]) for at in range(0, len(packed), KEY_BYTES))
    return DocumentRecord(**fields | {"salt": salt, "state": state, "keys": keys, "follows": follows})


def unpack_erasure(data: bytes) -> ErasureRecord:
    """The record in a file. Raises ValueError for anything else."""
    fields = _fields(data, _ERASURE_TYPES)
    keys = {name: tuple(BlockKey(bytes.fromhex(str(key))) for key in fields[name]) for name in ("own", "ends")}
    return ErasureRecord(**fields | keys | {"salt": bytes.fromhex(fields["salt"])})


def _fields(data: bytes, types: Mapping[str, tuple[type, ...]]) -> dict[str, Any]:
    fields = json.loads(data)
    if not isinstance(fields, dict) or fields.pop("version", None) != VERSION:
        raise ValueError(f"no record of version {VERSION}")
    if set(fields) != set(types):
        raise ValueError(f"it has other fields: {sorted(set(fields) ^ set(types))}")
    for name, allowed in types.items():
        if type(fields[name]) not in allowed:
            raise ValueError(f"{name} is a {type(fields[name]).__name__}")
    return fields
