"""Settings of ann_offload: the environment below `H3_ANN_OFFLOAD_`, and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import BeforeValidator, Field
from pydantic_settings import SettingsConfigDict

from h3kv.attention.work_area import HELPERS_MAX
from h3kv.core.units import parse_duration
from h3kv.memory.mailbox import SPIN_NS
from h3kv.rpc.addresses import parse_address
from h3kv.rpc.server import ServerConfig
from h3kv.service_settings import DELIMITER, AddressText, ServingSettings
from services.ann_offload.worker import WorkerConfig

_RUN: Final = "/run/h3"


def _duration(value: object) -> object:
    return parse_duration(value) if isinstance(value, str) else value


Duration = Annotated[int, BeforeValidator(_duration)]
"""Nanoseconds, written with a unit: `50us`."""


class Settings(ServingSettings):
    """All of them."""

    model_config = SettingsConfigDict(
        env_prefix="H3_ANN_OFFLOAD_",
        env_nested_delimiter=DELIMITER,
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
    )

    instance: str = "ann_offload"
    address: AddressText = parse_address(f"unix://{_RUN}/ann_offload.sock", field="address")
    """Where it serves: a unix socket, or a port, which needs credentials. Each of several workers has its own."""
    regions: Path = Path(f"{_RUN}/regions.sock")
    """Socket of the owner of the regions, `nvme_io`."""
    crew: Path = Path(f"{_RUN}/crew.sock")
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

    def server(self) -> ServerConfig:
        """Where and how it serves. Raises ConfigError."""
        return ServerConfig(self.address, credentials=self.credentials.read(), socket_group=self.socket_group)
