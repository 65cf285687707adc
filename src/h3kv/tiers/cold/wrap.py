"""Slabs made smaller for the way to the disk and back: bytes of equal weight brought together, then LZ4.

    slab     | b0 b1 | b0 b1 | b0 b1 | ...        elements of two bytes
    planes   | b0 b0 b0 ...  | b1 b1 b1 ...  |    what LZ4 is given

The upper bytes of floating-point numbers repeat, the lower ones do not: side by side no repetition is long enough.
Codes are one byte wide and stay as they are. Shapes: N elements, P bytes of one.
"""

from __future__ import annotations

import lz4.block
import numpy as np
from numpy.typing import NDArray

from h3kv.core.layout import PageLayout

_WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32}


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


def unwrap(stored: memoryview, size_bytes: int, *, element: int) -> NDArray[np.uint8] | None:
    """What was wrapped, or None where these bytes do not stand for so many.

    Args:
        stored: what `wrap` gave.
        size_bytes: of what was wrapped.
        element: bytes of one element.
    """
    try:
        planes = lz4.block.decompress(stored, uncompressed_size=size_bytes)
    except lz4.block.LZ4BlockError:
        return None
    if len(planes) != size_bytes:
        return None
    return _join(np.frombuffer(planes, dtype=np.uint8), element)


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


def _join(planes: NDArray[np.uint8], element: int) -> NDArray[np.uint8]:
    if element == 1:
        return planes
    planes_PN = planes.reshape(element, -1)
    word_N = planes_PN[-1].astype(_WORDS[element])
    for plane_N in planes_PN[-2::-1]:
        np.left_shift(word_N, 8, out=word_N)
        np.bitwise_or(word_N, plane_N, out=word_N)
    joined: NDArray[np.uint8] = word_N.view(np.uint8)
    return joined
