"""TorchPages and PagedCache against attention over plain tensors."""

from collections.abc import Iterator

import pytest
import torch

from h3kv.attention.native import TORCH_DTYPES
from h3kv.attention.page_table import PageRun
from h3kv.attention.paged import PagedCache
from h3kv.attention.reference import TokenRun, attend, pack_page
from h3kv.attention.torch_pages import TorchPages
from h3kv.core.layout import CacheLayout, PageLayout, SlabLayout
from h3kv.core.types import DType, SlotHandle
from h3kv.testing.engines import one_thread
from h3kv.tiers.device import DeviceStore, DeviceStoreConfig

LAYERS = 2

pytestmark = pytest.mark.usefixtures("single_thread")


@pytest.fixture
def single_thread() -> Iterator[None]:
    with one_thread():
        yield


def make_store(layout: CacheLayout) -> DeviceStore:
    store = DeviceStore(layout.slab, DeviceStoreConfig(capacity_bytes=layout.slab.size_bytes(16 * 6)))
    # What a page holds beyond its tokens must not matter: the worst is NaN in every element type.
    store.arena.fill_(0xFF)
    return store


def room(store: DeviceStore, blocks: int) -> tuple[list[int], list[SlotHandle]]:
    handles = store.reserve([blocks] * LAYERS)
    return [store.address(handle) for handle in handles], handles


def cache_layout(dtype: DType, head_dim: int, kv_heads: int) -> CacheLayout:
    return CacheLayout(SlabLayout(PageLayout(dtype=dtype, head_dim=head_dim), kv_heads), LAYERS)


@pytest.mark.parametrize("dtype", list(DType))
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 4, 64), (9, 3, 64), (8, 1, 80), (4, 2, 128)])
def test_chunks_attend_like_plain_attention(dtype: DType, heads: int, kv_heads: int, head_dim: int) -> None:
    layout = cache_layout(dtype, head_dim, kv_heads)
    store = make_store(layout)
    cache = PagedCache(TorchPages(store.arena, layout.slab.page), layout, pages=5)
    for blocks in (1, 4):
        cache.extend(room(store, blocks)[0], blocks)
    torch.manual_seed(heads + head_dim)
    total = 300
    torch_dtype = TORCH_DTYPES[dtype]
    q, k, v = (torch.randn(LAYERS, total, n, head_dim).to(torch_dtype) for n in (heads, kv_heads, kv_heads))
    start = 0
    for tokens in (1, 62, 2, 1, 128, 100, 6):
        end = start + tokens
        rows = 1 if tokens == 100 else tokens
        for layer in range(LAYERS):
            out = cache.attend(layer, q[layer, end - rows : end], k[layer, start:end], v[layer, start:end])
            run = TokenRun(k[layer, :end], v[layer, :end], torch.arange(end))
            expected = attend(q[layer, end - rows : end], [run], position=end - rows)
            assert out.dtype == torch_dtype
            assert out.is_contiguous()
            torch.testing.assert_close(
                out, expected.out_THD.to(torch_dtype), atol=2e-5, rtol=2e-5 if dtype is DType.FP32 else 1e-2
            )
        cache.advance(tokens)
        start = end
    assert cache.tokens == total
    assert cache.room_tokens == 20
    store.check_integrity()


@pytest.mark.parametrize("dtype", list(DType))
def test_appended_pages_have_the_drawn_layout(dtype: DType) -> None:
    layout = cache_layout(dtype, head_dim=32, kv_heads=2)
    store = make_store(layout)
    store.arena.zero_()
    cache = PagedCache(TorchPages(store.arena, layout.slab.page), layout, pages=2)
    addresses, (handle, _) = room(store, 2)
    cache.extend(addresses, 2)
    torch.manual_seed(1)
    k, v = (torch.randn(100, 2, 32).to(TORCH_DTYPES[dtype]) for _ in range(2))
    cache.attend(0, torch.zeros(100, 2, 32, dtype=k.dtype), k, v)
    for block, tokens in ((0, slice(0, 64)), (1, slice(64, 100))):
        for head in range(2):
            start = layout.slab.size_bytes(handle.slot) + layout.slab.page_offset(block, head, blocks=2)
            page = store.arena[start : start + layout.slab.page.size_bytes]
            assert torch.equal(page, pack_page(k[tokens, head], v[tokens, head], layout.slab.page))
    store.check_integrity()


def test_long_context_is_merged_from_runs() -> None:
    layout = cache_layout(DType.FP32, head_dim=16, kv_heads=1)
    store = DeviceStore(layout.slab, DeviceStoreConfig(capacity_bytes=layout.slab.size_bytes(16 * 20)))
    cache = PagedCache(TorchPages(store.arena, layout.slab.page), layout, pages=80)
    for _ in range(5):
        cache.extend(room(store, 16)[0], 16)
    torch.manual_seed(2)
    total = 80 * 64
    q, k, v = torch.randn(2, 1, 16), torch.randn(total, 1, 16) * 4, torch.randn(total, 1, 16)
    out = cache.attend(0, q, k, v)
    expected = attend(q, [TokenRun(k, v, torch.arange(total))], position=total - 2)
    torch.testing.assert_close(out, expected.out_THD, atol=2e-5, rtol=2e-5)
    store.check_integrity()


def test_mounted_blocks_are_read_and_never_written() -> None:
    layout = cache_layout(DType.FP32, head_dim=16, kv_heads=2)
    store = make_store(layout)
    pages = TorchPages(store.arena, layout.slab.page)
    torch.manual_seed(3)
    k, v = torch.randn(256, 2, 16), torch.randn(256, 2, 16)
    first = PagedCache(pages, layout, pages=4)
    shared, _ = room(store, 4)
    first.extend(shared, 4)
    first.attend(0, torch.zeros(1, 2, 16), k, v)
    before = store.arena.clone()

    second = PagedCache(pages, layout, pages=3)
    second.place(0, 2, PageRun(None, tuple(shared), room_blocks=4))
    second.set_tokens(128)
    assert second.tokens == 128
    own, _ = room(store, 1)
    second.extend(own, 1)
    q, k_new, v_new = torch.randn(3, 2, 16), torch.randn(3, 2, 16), torch.randn(3, 2, 16)
    out = second.attend(0, q, k_new, v_new)
    run = TokenRun(torch.cat([k[:128], k_new]), torch.cat([v[:128], v_new]), torch.arange(131))
    torch.testing.assert_close(out, attend(q, [run], position=128).out_THD, atol=2e-5, rtol=2e-5)
    changed = (store.arena != before).nonzero()
    own_start = own[0] - store.arena.data_ptr()
    assert changed.min() >= own_start
    assert changed.max() < own_start + layout.slab.block_bytes
    store.check_integrity()


def test_abandoned_chunk_leaves_no_trace() -> None:
    layout = cache_layout(DType.FP32, head_dim=16, kv_heads=1)
    store = make_store(layout)
    cache = PagedCache(TorchPages(store.arena, layout.slab.page), layout, pages=4)
    cache.extend(room(store, 4)[0], 4)
    torch.manual_seed(4)
    q, k, v = torch.randn(200, 1, 16), torch.randn(200, 1, 16), torch.randn(200, 1, 16)
    cache.attend(0, q, k, v)
    assert cache.tokens == 0
    out = cache.attend(0, q[:5], k[:5] + 1, v[:5])
    expected = attend(q[:5], [TokenRun(k[:5] + 1, v[:5], torch.arange(5))], position=0)
    torch.testing.assert_close(out, expected.out_THD, atol=2e-5, rtol=2e-5)
    cache.advance(5)
    assert cache.tokens == 5
    store.check_integrity()
