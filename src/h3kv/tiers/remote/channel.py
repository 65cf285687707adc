"""How the region of channels is divided: one pair of rings for each client, and a bell for each side.

    region    0             4096        + stride     + stride
              +-------------+-----------+------------+-----
              | server bell | channel 0 | channel 1  | ...
              +-------------+-----------+------------+-----

    channel   0        4        8           16       24       32       4096          + ring          + ring
              +--------+--------+-----------+--------+--------+--------+-------------+---------------+
              | holder | zero   | client's  | posted | pins   | zero   | submissions | completions   |
              | u32    |        | bell      | u64    | u64    |        |             |               |
              +--------+--------+-----------+--------+--------+--------+-------------+---------------+

The server gives a channel to a client when it registers, clears it, and only then writes the holder's number: the
client finds its channel by it. `posted` counts the client's records, and `pins` what its running sequences use of HOST:
for gauges, nobody decides by them.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final

from h3kv import _native
from h3kv.core.errors import NotRegisteredError, PeerBusyError
from h3kv.core.limits import DIRECT_IO_BYTES
from h3kv.memory.bell import Bell
from h3kv.memory.leases import NOBODY
from h3kv.memory.region import Region
from h3kv.memory.region_format import OpaqueGeometry
from h3kv.tiers.remote.ring import RecordRing

PURPOSE: Final = "channel"
CHANNELS_MAX: Final = 8
"""Clients that read and write the cold store at a time: workers, not offload workers."""
RING_BYTES: Final = 1 << 20
"""Records of one direction: 32,768 reads of units."""
RECORD_BYTES_MAX: Final = 256 << 10

_RING_STRIDE: Final = DIRECT_IO_BYTES + RING_BYTES
_STRIDE: Final = DIRECT_IO_BYTES + 2 * _RING_STRIDE
_HOLDER: Final = struct.Struct("<I")
_COUNT: Final = struct.Struct("<Q")
_BELL_OFFSET: Final = 8
_POSTED_OFFSET: Final = 16
_PINS_OFFSET: Final = 24

GEOMETRY: Final = OpaqueGeometry(DIRECT_IO_BYTES + CHANNELS_MAX * _STRIDE)

assert RECORD_BYTES_MAX + _native.RECORD_HEADER_BYTES <= RING_BYTES
assert _native.RING_HEADER_BYTES <= DIRECT_IO_BYTES


@dataclass(frozen=True, slots=True)
class ChannelSide:
    """What one side of a channel works with."""

    incoming: RecordRing
    outgoing: RecordRing
    own_bell: Bell
    """Rung when there is news for this side."""
    peer_bell: Bell


class ChannelRegion:
    """The region of channels, seen from either side. It stays mapped for as long as this lives."""

    def __init__(self, region: Region) -> None:
        assert region.geometry == GEOMETRY, "a region of channels"
        self._memory = region.slots
        self._address = region.address + GEOMETRY.data_offset
        self.server_bell = Bell(self._address)

    def give(self, holder: int) -> ChannelSide:
        """The server's side of a channel that is the holder's from now on, empty.

        Raises:
            PeerBusyError: all are in use.
        """
        index = self._find(holder)
        if index is None:
            index = self._find(NOBODY)
        if index is None:
            raise PeerBusyError(
                f"{CHANNELS_MAX} clients use the cold store already: end one, then try again", peer="nvme_io"
            )
        start = self._start(index)
        # The bell stays as it is: somebody may be waiting on it, and counts himself out afterwards.
        for offset in (_POSTED_OFFSET, _PINS_OFFSET):
            _COUNT.pack_into(self._memory, start + offset, 0)
        for ring in self._rings(index):
            _native.ring_clear(ring)
        _HOLDER.pack_into(self._memory, start, holder)
        return self._side(index, is_server=True)

    def take_back(self, holder: int) -> None:
        """A holder has gone: its channel may be given to another."""
        index = self._find(holder)
        if index is not None:
            _HOLDER.pack_into(self._memory, self._start(index), NOBODY)

    def take_all_back(self) -> None:
        """Of a server before this one."""
        for index in range(CHANNELS_MAX):
            _HOLDER.pack_into(self._memory, self._start(index), NOBODY)

    def join(self, holder: int) -> ChannelSide:
        """The client's side of the channel that the server gave it.

        Raises:
            NotRegisteredError: it has none.
        """
        index = self._find(holder)
        if index is None:
            raise NotRegisteredError("the owner of the regions gave this client no channel", client_id=holder)
        return self._side(index, is_server=False)

    def note_posted(self, holder: int, records: int) -> None:
        """Say how many records a client has pushed in all."""
        self._note(holder, _POSTED_OFFSET, records)

    def posted(self, holder: int) -> int:
        """How many records a client says it has pushed."""
        return self._noted(holder, _POSTED_OFFSET)

    def note_pins(self, holder: int, pins: int) -> None:
        """Say how many pins a client's running sequences have on segments in HOST."""
        self._note(holder, _PINS_OFFSET, pins)

    def pins(self, holder: int) -> int:
        """How many pins a client says it has; none for one that has gone."""
        return self._noted(holder, _PINS_OFFSET)

    def _note(self, holder: int, offset: int, count: int) -> None:
        index = self._find(holder)
        if index is not None:
            _COUNT.pack_into(self._memory, self._start(index) + offset, count)

    def _noted(self, holder: int, offset: int) -> int:
        index = self._find(holder)
        return 0 if index is None else int(_COUNT.unpack_from(self._memory, self._start(index) + offset)[0])

    def _find(self, holder: int) -> int | None:
        for index in range(CHANNELS_MAX):
            if _HOLDER.unpack_from(self._memory, self._start(index))[0] == holder:
                return index
        return None

    @staticmethod
    def _start(index: int) -> int:
        return DIRECT_IO_BYTES + index * _STRIDE

    def _rings(self, index: int) -> tuple[int, int]:
        """Addresses of the rings of submissions and of completions."""
        first = self._address + self._start(index) + DIRECT_IO_BYTES
        return first, first + _RING_STRIDE

    def _side(self, index: int, *, is_server: bool) -> ChannelSide:
        submissions, completions = (
            RecordRing(address, capacity=RING_BYTES, record_bytes_max=RECORD_BYTES_MAX)
            for address in self._rings(index)
        )
        client_bell = Bell(self._address + self._start(index) + _BELL_OFFSET)
        if is_server:
            return ChannelSide(submissions, completions, self.server_bell, client_bell)
        return ChannelSide(completions, submissions, client_bell, self.server_bell)
