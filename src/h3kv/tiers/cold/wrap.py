"""Slabs made smaller for the way to the disk and back: bytes of equal weight brought together, then LZ4.

    slab     | b0 b1 | b0 b1 | b0 b1 | ...        elements of two bytes
    planes   | b0 b0 b0 ...  | b1 b1 b1 ...  |    what LZ4 is given

The upper bytes of floating-point numbers repeat, the lower ones do not: side by side no repetition is long enough.
Codes are one byte wide and stay as they are. Shapes: N elements, P bytes of one.
"""

from __future__ import annotations

from typing import Final

import lz4.block
import numpy as np

from h3kv import _native
from h3kv.core.layout import PageLayout
from h3kv.memory.copies import CopyMeter

UNWRAPPED: Final = "unwrapped"
"""Ways of `CopyMeter`: LZ4 decoded, and planes joined to elements."""
JOINED: Final = "joined"


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
    stored_N, target_N = (np.frombuffer(side, dtype=np.uint8) for side in (stored, target))
    copies.count(UNWRAPPED, target.nbytes)
    sizes = stored_N.size, target_N.ctypes.data, target.nbytes, element
    if not _native.lz4_unwrap(stored_N.ctypes.data, *sizes):
        return False
    if element > 1:
        copies.count(JOINED, target.nbytes)
    return True


def _split(data: memoryview, element: int) -> memoryview:
    if element == 1:
        return data
    whole_N = np.frombuffer(data, dtype=np.uint8)
    planes_N = np.empty_like(whole_N)
    _native.split_planes(whole_N.ctypes.data, whole_N.size // element, element, planes_N.ctypes.data)
    return planes_N.data
