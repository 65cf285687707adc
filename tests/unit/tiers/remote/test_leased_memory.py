"""An address passes only where every byte of its range lies in units that the client leases."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from h3kv.memory.leases import LeaseTable
from h3kv.memory.region import Region, RegionKind
from h3kv.memory.region_format import RegionGeometry
from h3kv.tiers.remote.leased_memory import LeasedMemory

MINE, OTHER = 2, 3
UNITS, BLOCK_BYTES = 6, 4096
UNIT_BYTES = 16 * BLOCK_BYTES


class Place:
    """Two regions; units 0, 1 and 4 of the first are mine, 2 is another's, 3 and 5 are free; the second is mine."""

    def __init__(self) -> None:
        geometry = RegionGeometry(BLOCK_BYTES, UNITS * 16)
        self.regions = [Region.create(geometry, kinds=(RegionKind.MEMFD,)) for _ in range(2)]
        leases = [LeaseTable(region.table) for region in self.regions]
        leases[0].lease(MINE, 2)
        leases[0].lease(OTHER, 2)
        leases[0].lease(MINE, 1)
        leases[0].give_back(OTHER, [3])
        leases[1].lease(MINE, UNITS)
        self.memory = LeasedMemory(self.regions)
        self.starts = [region.address + region.geometry.data_offset for region in self.regions]

    def is_mine(self, address: int, size_bytes: int) -> bool:
        """The slow way: unit by unit."""
        for start, mine in zip(self.starts, ({0, 1, 4}, set(range(UNITS))), strict=True):
            if start <= address and address + size_bytes <= start + UNITS * UNIT_BYTES:
                first, last = (address - start) // UNIT_BYTES, (address + size_bytes - 1 - start) // UNIT_BYTES
                return 0 < size_bytes <= UNIT_BYTES and set(range(first, last + 1)) <= mine
        return False

    def find(self, *ranges: tuple[int, int]) -> bool:
        addresses_N = np.array([address for address, _ in ranges], dtype=np.uint64)
        sizes_N = np.array([size for _, size in ranges], dtype=np.uint64)
        return self.memory.find(MINE, addresses_N, sizes_N) is not None


@pytest.fixture(scope="module")
def place() -> Iterator[Place]:
    made = Place()
    yield made
    made.memory.check_idle()


OFFSETS = st.integers(-2 * UNIT_BYTES, (UNITS + 2) * UNIT_BYTES)
SIZES = st.one_of(st.integers(0, 2 * UNIT_BYTES), st.integers(0, (1 << 64) - 1))
RANGES = st.lists(st.tuples(st.integers(0, 1), OFFSETS, SIZES), min_size=1, max_size=5)


@given(ranges=RANGES)
def test_ranges_are_found_as_the_slow_way_finds_them(place: Place, ranges: list[tuple[int, int, int]]) -> None:
    wanted = [(place.starts[region] + offset, size) for region, offset, size in ranges]
    assert place.find(*wanted) == all(place.is_mine(*each) for each in wanted)


@given(address=st.integers(0, (1 << 64) - 1), size_bytes=st.integers(0, (1 << 64) - 1))
def test_any_numbers_are_answered(place: Place, address: int, size_bytes: int) -> None:
    assert place.find((address, size_bytes)) == place.is_mine(address, size_bytes)


def test_units_with_io_under_way_are_known(place: Place) -> None:
    start = place.starts[0]
    units = place.memory.find(
        MINE, np.array([start + UNIT_BYTES - 4096], dtype=np.uint64), np.array([8192], dtype=np.uint64)
    )
    assert units is not None
    place.memory.begin(units)
    assert place.memory.is_in_use(0, [0]) and place.memory.is_in_use(0, [1])
    assert not place.memory.is_in_use(0, [4]) and not place.memory.is_in_use(1, range(UNITS))
    place.memory.end(units)
    assert not place.memory.is_in_use(0, range(UNITS))
