"""Memory of a region made known to CUDA, so that a GPU copies from and to it directly.

Registration locks pages, which takes long for much memory and may be refused for some of it: it goes in chunks.
"""

from __future__ import annotations

from typing import Any, Final, Protocol

import torch

from h3kv.core.errors import HostMemoryError
from h3kv.core.units import describe_size
from h3kv.machine import memlock_limit_bytes
from h3kv.memory.region import Region

CHUNK_BYTES: Final = 1 << 30
"""One request to the driver: it holds locks of the process's memory meanwhile."""
_PORTABLE: Final = 1
"""cudaHostRegisterPortable: pinned for every device."""
_SUCCESS: Final = 0


class CudaRuntime(Protocol):
    """The part of the CUDA runtime that registers memory; both functions return a cudaError."""

    def register(self, address: int, size_bytes: int) -> int:
        """CudaHostRegister."""
        ...

    def unregister(self, address: int) -> int:
        """CudaHostUnregister."""
        ...


class TorchCudaRuntime:
    """The CUDA runtime that torch has loaded.

    Raises:
        RuntimeError: this torch has no CUDA, or there is no device.
    """

    def __init__(self) -> None:
        # torch says nothing of the types in there.
        cuda: Any = torch.cuda
        self._runtime = cuda.cudart()

    def register(self, address: int, size_bytes: int) -> int:
        """See `CudaRuntime`."""
        return int(self._runtime.cudaHostRegister(address, size_bytes, _PORTABLE))

    def unregister(self, address: int) -> int:
        """See `CudaRuntime`."""
        return int(self._runtime.cudaHostUnregister(address))


def cuda_runtime() -> CudaRuntime | None:
    """The runtime where a CUDA device is there, else None."""
    return TorchCudaRuntime() if torch.cuda.is_available() else None


class CudaRegistration:
    """The slots of a region, registered with CUDA; all of them or none.

    Args:
        region: stays mapped until `close`.
        runtime: of CUDA.

    Raises:
        HostMemoryError: the driver refuses; the message has its error and the limits.
    """

    def __init__(self, region: Region, runtime: CudaRuntime, *, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._runtime = runtime
        self._slots = region.slots
        self._chunks: list[int] = []
        start = region.address + region.geometry.data_offset
        end = start + region.geometry.data_bytes
        for address in range(start, end, chunk_bytes):
            size_bytes = min(chunk_bytes, end - address)
            status = runtime.register(address, size_bytes)
            if status != _SUCCESS:
                done_bytes = address - start
                self.close()
                raise _refusal(status, end - start, done_bytes=done_bytes)
            self._chunks.append(address)

    @property
    def chunks(self) -> int:
        """Registered now."""
        return len(self._chunks)

    def close(self) -> None:
        """Unregister. Calling it again does nothing."""
        while self._chunks:
            self._runtime.unregister(self._chunks.pop())
        self._slots = memoryview(b"")


def _refusal(status: int, wanted_bytes: int, *, done_bytes: int) -> HostMemoryError:
    limit_bytes = memlock_limit_bytes()
    limit = "there is no memlock limit" if limit_bytes is None else f"the memlock limit is {describe_size(limit_bytes)}"
    return HostMemoryError(
        f"CUDA refuses to register {describe_size(wanted_bytes)} (cudaError {status} after "
        f"{describe_size(done_bytes)}; {limit}): raise `ulimit -l`, or lower host.kv_bytes",
        needed_bytes=wanted_bytes,
        available_bytes=done_bytes,
    )
