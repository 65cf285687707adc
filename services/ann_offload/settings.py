"""Settings of ann_offload: the environment below `H3_ANN_OFFLOAD_`, and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from h3kv.memory.mailbox import SPIN_NS
from h3kv.memory.work_area import HELPERS_MAX
from h3kv.service_settings import RUN_FOLDER, AddressText, Duration, ServingSettings, socket_address
from services.ann_offload.worker import WorkerConfig


class Settings(ServingSettings):
    """All of them."""

    model_config = SettingsConfigDict(env_prefix="H3_ANN_OFFLOAD_")

    instance: str = "ann_offload"
    address: AddressText = socket_address("ann_offload")
    """Where it serves: a unix socket, or a port, which needs credentials. Each of several workers has its own."""
    regions: Path = RUN_FOLDER / "regions.sock"
    """Socket of the owner of the regions, `nvme_io`."""
    crew: Path = RUN_FOLDER / "crew.sock"
    """Socket on which `gpu_worker` takes helpers."""
    controller: AddressText | None = None
    """Of `migration_controller`, for reports. Nothing: it does not report."""
    threads: int = Field(default=1, ge=1, le=HELPERS_MAX)
    """That attend. More processes do as well: this is one place to set it."""
    spin: Annotated[Duration, Field(ge=0, le=10_000_000)] = SPIN_NS
    """How long a thread looks for work before it sleeps, up to 10ms. Longer finds the next layer's work sooner, and
    takes a core for itself."""
    isa: Literal["auto", "portable", "avx2", "avx512"] = "auto"
    """Instruction set: that of `gpu_worker`. Work of another one is refused, since its numbers differ."""

    def worker(self) -> WorkerConfig:
        """Where it finds its work."""
        return WorkerConfig(self.regions, self.crew, threads=self.threads, spin_ns=self.spin, name=self.instance)
