"""What processes say to each other over the socket that passes regions: JSON, one object a packet, bounded.

    client -> hub   hello     name, boot token, and what it still has mapped, with the descriptors
    hub -> client   welcome   holder number, boot token of the hub, the regions; descriptors of those the client lacks
                    unmap     what the client has mapped is no longer used: let go of it, then say hello with nothing
                    refused   why

Whatever is not exactly one of these is refused.
"""

from __future__ import annotations

import json
import re
import socket
from dataclasses import dataclass
from typing import Any, Final

from h3kv.memory.region_format import BOOT_TOKEN_BYTES, REGIONS_MAX, RegionIdentity

MESSAGE_BYTES_MAX: Final = 16 << 10
"""32 regions of about 120 bytes each fit four times."""

_NAME: Final = re.compile(r"[a-z0-9][a-z0-9_.-]{0,62}")
_TOKEN: Final = re.compile(rf"[0-9a-f]{{{2 * BOOT_TOKEN_BYTES}}}")


@dataclass(frozen=True, slots=True)
class Hello:
    """A client says who it is."""

    name: str
    boot_token: bytes
    holder: int | None
    """The number that an owner gave it, where it was connected before."""
    regions: tuple[RegionIdentity, ...]
    """What it has mapped. Their descriptors come along, in this order."""


@dataclass(frozen=True, slots=True)
class Welcome:
    """The client is a holder now."""

    owner: bytes
    """Boot token of the hub's process."""
    holder: int
    regions: tuple[RegionIdentity, ...]
    """All of them. Descriptors of those that the client did not name come along, in this order."""


@dataclass(frozen=True, slots=True)
class UnmapFirst:
    """The regions that the client has mapped are not those that the hub serves."""


@dataclass(frozen=True, slots=True)
class Refused:
    """The hub does not want this client."""

    reason: str


Message = Hello | Welcome | UnmapFirst | Refused


@dataclass(frozen=True, slots=True)
class MarkedHolder:
    """A holder as the marker names it."""

    holder: int
    name: str
    boot_token: bytes


@dataclass(frozen=True, slots=True)
class Marker:
    """What an owner writes down for the one that comes after it."""

    regions: tuple[RegionIdentity, ...]
    holders: tuple[MarkedHolder, ...]


def encode(message: Message) -> bytes:
    """A packet."""
    match message:
        case Hello(name, token, holder, regions):
            fields = {"hello": name, "token": token.hex(), "holder": holder, "regions": [*map(_packed, regions)]}
        case Welcome(owner, holder, regions):
            fields = {"welcome": owner.hex(), "holder": holder, "regions": [*map(_packed, regions)]}
        case UnmapFirst():
            fields = {"unmap": True}
        case Refused(reason):
            fields = {"refused": reason}
    packet = json.dumps(fields).encode()
    assert len(packet) <= MESSAGE_BYTES_MAX
    return packet


def decode(packet: bytes) -> Message:
    """The message in a packet.

    Raises:
        ValueError: it is none of ours.
    """
    fields = _object(_loaded(packet))
    match sorted(fields):
        case ["hello", "holder", "regions", "token"]:
            holder = fields["holder"]
            return Hello(
                _text(fields["hello"], _NAME),
                bytes.fromhex(_text(fields["token"], _TOKEN)),
                None if holder is None else _number(holder, 0xFFFF),
                _regions(fields["regions"]),
            )
        case ["holder", "regions", "welcome"]:
            return Welcome(
                bytes.fromhex(_text(fields["welcome"], _TOKEN)),
                _number(fields["holder"], 0xFFFF),
                _regions(fields["regions"]),
            )
        case ["unmap"]:
            return UnmapFirst()
        case ["refused"]:
            return Refused(_text(fields["refused"], re.compile(r"[\x20-\x7e]{0,300}")))
    raise ValueError("fields of no message")


def encode_marker(marker: Marker) -> bytes:
    """The content of a marker file."""
    holders = [[each.holder, each.name, each.boot_token.hex()] for each in marker.holders]
    return json.dumps({"regions": [*map(_packed, marker.regions)], "holders": holders}, indent=1).encode()


def decode_marker(content: bytes) -> Marker:
    """What a marker file says.

    Raises:
        ValueError: it is none of ours.
    """
    fields = _object(_loaded(content))
    if sorted(fields) != ["holders", "regions"]:
        raise ValueError("fields of no marker")
    holders = []
    for entry in _list(fields["holders"], 0xFFFF):
        number, name, token = _list(entry, 3)
        holders.append(MarkedHolder(_number(number, 0xFFFF), _text(name, _NAME), bytes.fromhex(_text(token, _TOKEN))))
    return Marker(_regions(fields["regions"]), tuple(holders))


def receive(channel: socket.socket) -> tuple[bytes, list[int]]:
    """One packet with its descriptors, which belong to the caller; an empty packet at the end of the connection.

    Raises:
        ValueError: the packet or the descriptors are more than a message may have. They were closed.
        OSError: as of `recvmsg`.
    """
    packet, fds, flags, _ = socket.recv_fds(channel, MESSAGE_BYTES_MAX, REGIONS_MAX, socket.MSG_CMSG_CLOEXEC)
    if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
        close_all(fds)
        raise ValueError("a packet larger than any message")
    return packet, fds


def close_all(fds: list[int]) -> None:
    """Close descriptors that came with a packet."""
    for fd in fds:
        socket.close(fd)


def _packed(region: RegionIdentity) -> list[Any]:
    return [region.id, region.purpose, region.boot_token.hex()]


def _regions(value: object) -> tuple[RegionIdentity, ...]:
    regions = []
    for entry in _list(value, REGIONS_MAX):
        number, purpose, token = _list(entry, 3)
        region = RegionIdentity(
            _number(number, REGIONS_MAX - 1),
            _text(purpose, re.compile(r"[a-z0-9_]+")),
            bytes.fromhex(_text(token, _TOKEN)),
        )
        if not region.is_sound:
            raise ValueError("no region is called so")
        regions.append(region)
    if len({region.id for region in regions}) < len(regions) or len({each.purpose for each in regions}) < len(regions):
        raise ValueError("a region is named twice")
    return tuple(regions)


def _loaded(packet: bytes) -> object:
    try:
        return json.loads(packet.decode("ascii"))
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def _object(value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError("not an object")  # noqa: TRY004  one error for whatever is not a message
    return value


def _list(value: object, length_max: int) -> list[Any]:
    if not isinstance(value, list) or len(value) > length_max:
        raise ValueError("not a list, or too long")
    return value


def _number(value: object, largest: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= largest:
        raise ValueError("not a number in its range")
    return value


def _text(value: object, form: re.Pattern[str]) -> str:
    if not isinstance(value, str) or form.fullmatch(value) is None:
        raise ValueError("not a text of its form")
    return value
