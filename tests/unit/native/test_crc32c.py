from __future__ import annotations

import random

import numpy as np
import pytest

from h3kv import _native

POLYNOMIAL = 0x82F63B78
VECTORS = {
    b"": 0,
    b"123456789": 0xE3069283,
    bytes(32): 0x8A9136AA,
    b"\xff" * 32: 0x62A8AB43,
    bytes(range(32)): 0x46DD794E,
    bytes(reversed(range(32))): 0x113FDB5C,
    bytes.fromhex(
        "01c000000000000000000000000000001400000000000400000000140000001828000000000000000200000000000000"
    ): 0xD9963A56,
}
"""RFC 3720, appendix B.4, and the check value of the CRC catalogue."""


def reference(data: bytes) -> int:
    """One bit at a time."""
    state = 0xFFFFFFFF
    for byte in data:
        state ^= byte
        for _ in range(8):
            state = state >> 1 ^ (POLYNOMIAL if state & 1 else 0)
    return state ^ 0xFFFFFFFF


def native(data: bytes, method: str = "", *, shift: int = 0) -> int:
    room_N = np.frombuffer(bytes(shift) + data + b"\xaa", dtype=np.uint8)
    return _native.crc32c(int(room_N.ctypes.data) + shift, len(data), method)


@pytest.mark.parametrize("data", VECTORS, ids=lambda data: f"{len(data)} bytes")
def test_published_vectors_come_out(data: bytes) -> None:
    assert reference(data) == VECTORS[data]
    assert native(data) == VECTORS[data]
    assert [native(data, method) for method in _native.crc32c_methods()] == [VECTORS[data]] * len(
        _native.crc32c_methods()
    )


@pytest.mark.parametrize("method", _native.crc32c_methods())
def test_every_method_agrees_with_the_reference_at_every_length_and_alignment(method: str) -> None:
    chance = random.Random(3)
    lengths = [*range(0, 70, 3), 191, 192, 193, 511, 512, 513, 767, 768, 1025, 1500]
    for length in lengths:
        data = chance.randbytes(length)
        shift = chance.randrange(64)
        assert native(data, method, shift=shift) == reference(data), (length, shift)


@pytest.mark.parametrize("method", _native.crc32c_methods())
def test_every_method_agrees_on_pages(method: str) -> None:
    chance = random.Random(5)
    for length in (4096, 16384, 16384 + 8, 65536, 100_003):
        data = chance.randbytes(length)
        assert native(data, method) == native(data, "portable"), length


def test_one_flipped_bit_changes_the_checksum() -> None:
    data = bytearray(random.Random(7).randbytes(4096))
    before = native(bytes(data))
    for place in (0, 1000, 4095):
        data[place] ^= 16
        assert native(bytes(data)) != before
        data[place] ^= 16


def test_a_method_that_the_processor_lacks_is_refused() -> None:
    with pytest.raises(ValueError, match="not available"):
        native(b"x", "abacus")
