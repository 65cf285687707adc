"""Settings of nvme_io: the environment below `H3_NVME_IO_`, and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Final, Literal

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from h3kv.config import Count, PathOrNone, Size, SizeOrNone
from h3kv.core.errors import ConfigError
from h3kv.memory.work_area import HELPERS_MAX, WorkGeometry
from h3kv.rpc.addresses import UnixAddress
from h3kv.service_settings import AddressText, ServingSettings, socket_address
from h3kv.tiers.cold.config import ColdStoreConfig

REGIONS_SOCKET: Final = "regions.sock"


class Settings(ServingSettings):
    """All of them."""

    model_config = SettingsConfigDict(env_prefix="H3_NVME_IO_")

    instance: str = "nvme_io"
    address: AddressText = socket_address("nvme_io")
    """Where it serves: a unix socket, or a port, which needs credentials."""
    regions_socket: PathOrNone = None
    """Where it passes its regions. Nothing: `regions.sock` beside the unix socket that it serves."""
    host_bytes: Size = Field(default=1 << 30, ge=1)
    """Cap of the slots in HOST in total, rounded down to whole units."""
    index_bytes: Size = Field(default=256 << 20, ge=1)
    """Cap of the indexes of segments that lie in the cold store alone, where the model's encoding has any."""
    offload_threads: int = Field(default=WorkGeometry().helpers, ge=0, le=HELPERS_MAX)
    """Threads of all processes of ann_offload that may help at once. 0: none ever helps."""
    store: PathOrNone = None
    """Folder, file or block device of the cold store. Nothing: there is none."""
    capacity: SizeOrNone = None
    """Cap of the cold store. Nothing: as large as it was made."""
    wrap: Literal["none", "lz4"] = "none"
    """Whether what is written is compressed."""
    backend: Literal["auto", "io_uring", "threads"] = "auto"
    """What reads and writes. `auto`: io_uring, or threads where it is refused."""
    depth: Count = Field(default=128, ge=1, le=4096)
    """Reads and writes that the device is given at a time."""
    write_bytes_per_day: SizeOrNone = None
    """Bytes that may be written in a day (UTC). Nothing: any."""
    controller: AddressText | None = None
    """Where the controller serves, to which measurements are reported. Nothing: nobody is told."""
    adopt_seconds: float = Field(default=5.0, ge=0.0, le=600.0)
    """How long holders of a forerunner's regions may take to offer them."""
    nice: int = Field(default=15, ge=0, le=19)
    """How far this process stands back from others that want its cores. Who waits for a read sleeps meanwhile."""
    drain_seconds: float = Field(default=1.0, ge=0.0, le=3600.0)
    """How long calls that run may go on after the process was told to end."""

    @property
    def regions_path(self) -> Path:
        """Where regions are passed on. Raises ConfigError where no folder is known."""
        if self.regions_socket is not None:
            return self.regions_socket
        if isinstance(self.address, UnixAddress):
            return self.address.path.with_name(REGIONS_SOCKET)
        raise ConfigError(
            f"address = {self.address}: with a port, regions_socket must name where regions are passed on",
            field="regions_socket",
        )

    def cold_store(self) -> ColdStoreConfig:
        """Size and limits of the cold store."""
        return ColdStoreConfig(
            capacity_bytes=self.capacity,
            backend=self.backend,
            depth=self.depth,
            write_bytes_per_day=self.write_bytes_per_day,
            wrap=self.wrap,
        )
