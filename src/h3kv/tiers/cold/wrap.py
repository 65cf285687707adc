"""Slabs made smaller for the way to the disk and back: bytes of equal weight brought together, then LZ4.

    slab     | b0 b1 | b0 b1 | b0 b1 | ...        elements of two bytes
    planes   | b0 b0 b0 ...  | b1 b1 b1 ...  |    what LZ4 is given

The upper bytes of floating-point numbers repeat, the lower ones do not: side by side no repetition is long enough.
Codes are one byte wide and stay as they are. Shapes: N elements, P bytes of one.
"""

from __future__ import annotations

from typing import Any, Final

import lz4.block
import numpy as np
from numpy.typing import NDArray

from h3kv import _native
from h3kv.core.layout import PageLayout
from h3kv.memory.copies import CopyMeter

UNWRAPPED: Final = "unwrapped"
"""Ways of `CopyMeter`: LZ4 decoded, and planes joined to elements."""
JOINED: Final = "joined"

_WORDS: Final[dict[int, type[np.unsignedinteger[Any]]]] = {2: np.uint16, 4: np.uint32}


def element_bytes(page: PageLayout) -> int:
    """Bytes of one element of a slab: of a number in `raw` pages, else of a code."""
    return page.dtype.size_bytes if page.is_raw else 1


def wrap(data: memoryview, *, element: int) -> bytes:
    """The bytes to be stored: not always fewer.

    Args:
        data: whole elements. Not modified.
        element: bytes of one.

    Cost: one core makes 0.5 to 1 GB/s of it. The GIL is released but for moments.
    """
    packed: bytes = lz4.block.compress(_split(data, element), store_size=False)
    return packed


def unwrap(stored: memoryview, target: memoryview, *, element: int, copies: CopyMeter) -> bool:
    """Put what was wrapped into its place. False: these bytes do not stand for so many; the target holds anything.

    Args:
        stored: what `wrap` gave.
        target: writable room of exactly what was wrapped; it shares no byte with `stored`.
        element: bytes of one element.
        copies: where passes over the bytes are counted: one, and one more where planes are joined.
    """
    size_bytes = target.nbytes
    room_N = np.frombuffer(target, dtype=np.uint8) if element == 1 else np.empty(size_bytes, dtype=np.uint8)
    stored_N = np.frombuffer(stored, dtype=np.uint8)
    copies.count(UNWRAPPED, size_bytes)
    if not _native.lz4_decode(stored_N.ctypes.data, stored_N.size, room_N.ctypes.data, size_bytes):
        return False
    if element > 1:
        copies.count(JOINED, size_bytes)
        _join(room_N, np.frombuffer(target, dtype=_WORDS[element]), element)
    return True


def _split(data: memoryview, element: int) -> memoryview:
    if element == 1:
        return data
    word_N = np.frombuffer(data, dtype=_WORDS[element])
    planes_PN = np.empty((element, word_N.size), dtype=np.uint8)
    shifted_N = np.empty_like(word_N)
    for plane_N, bits in zip(planes_PN, range(0, 8 * element, 8), strict=True):
        np.right_shift(word_N, bits, out=shifted_N)
        np.copyto(plane_N, shifted_N, casting="unsafe")
    return planes_PN.data.cast("B")


def _join(planes: NDArray[np.uint8], word_N: NDArray[Any], element: int) -> None:
    planes_PN = planes.reshape(element, -1)
    np.copyto(word_N, planes_PN[-1])
    for plane_N in planes_PN[-2::-1]:
        np.left_shift(word_N, 8, out=word_N)
        np.bitwise_or(word_N, plane_N, out=word_N)
