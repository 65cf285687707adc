"""How a region is given to CUDA, with a driver that keeps a list. No GPU has run this."""

import pytest

from h3kv.core.errors import HostMemoryError
from h3kv.memory.cuda_registration import CudaRegistration, cuda_runtime
from h3kv.memory.region import Region
from h3kv.memory.region_format import RegionGeometry

GEOMETRY = RegionGeometry(block_bytes=1 << 20, blocks=16)
OUT_OF_MEMORY = 2


class ListedRuntime:
    """Registers so many ranges, then refuses."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.ranges: dict[int, int] = {}

    def register(self, address: int, size_bytes: int) -> int:
        if len(self.ranges) == self.most:
            return OUT_OF_MEMORY
        self.ranges[address] = size_bytes
        return 0

    def unregister(self, address: int) -> int:
        del self.ranges[address]
        return 0


def test_all_slots_are_registered_in_chunks_that_touch() -> None:
    region, runtime = Region.create(GEOMETRY), ListedRuntime(most=100)
    registration = CudaRegistration(region, runtime, chunk_bytes=3 << 20)
    start = region.data.data_ptr()
    assert list(runtime.ranges.items()) == [
        (start + at, min(3 << 20, (16 << 20) - at)) for at in range(0, 16 << 20, 3 << 20)
    ]
    assert registration.chunks == 6
    registration.close()
    registration.close()
    assert runtime.ranges == {}
    region.close()
    assert not region.is_mapped


def test_refusal_takes_back_what_was_registered_and_says_how_far_it_came() -> None:
    region, runtime = Region.create(GEOMETRY), ListedRuntime(most=2)
    with pytest.raises(HostMemoryError, match=r"cudaError 2 after 8.00 MiB; .*memlock limit.*ulimit -l") as caught:
        CudaRegistration(region, runtime, chunk_bytes=4 << 20)
    assert (caught.value.needed_bytes, caught.value.available_bytes) == (16 << 20, 8 << 20)
    assert runtime.ranges == {}
    region.close()


@pytest.mark.gpu
def test_memory_is_registered_with_a_real_device() -> None:
    runtime = cuda_runtime()
    if runtime is None:
        pytest.skip("no CUDA device")
    region = Region.create(GEOMETRY)
    registration = CudaRegistration(region, runtime, chunk_bytes=4 << 20)
    assert region.data.is_pinned()
    registration.close()
    region.close()
