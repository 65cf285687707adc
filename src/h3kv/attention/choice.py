"""Which kernels attend to pages: the native core where it can, else torch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from h3kv.attention import native
from h3kv.attention.page_seams import PageKernels
from h3kv.attention.torch_pages import TorchPages
from h3kv.core.layout import PageLayout
from h3kv.core.limits import LANE_TOKENS


def has_native(device: torch.device, head_dim: int) -> bool:
    """Whether the native core takes heads of this size on this device: in main memory, in whole lanes."""
    return device.type == "cpu" and head_dim % LANE_TOKENS == 0


@contextlib.contextmanager
def page_kernels(arena: Tensor, page: PageLayout) -> Iterator[PageKernels]:
    """Kernels for pages in an arena; what they hold of it is given back at the end."""
    if has_native(arena.device, page.head_dim):
        yield native
        return
    torch_pages = TorchPages(arena, page)
    try:
        yield torch_pages
    finally:
        torch_pages.close()
