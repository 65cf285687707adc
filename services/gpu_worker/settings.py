"""Settings of gpu_worker: the environment below `H3_GPU_WORKER_`, and nothing else."""

from __future__ import annotations

from typing import Literal

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from h3kv import config
from h3kv.config import (
    AttentionSettings,
    Count,
    DeviceSettings,
    EngineSettings,
    HostSettings,
    ModelSettings,
    NvmeSettings,
    RuntimeSettings,
    TieringSettings,
)
from h3kv.core.errors import ConfigError
from h3kv.rpc.addresses import UnixAddress
from h3kv.service_settings import AddressText, InstanceName, ServingSettings


class Settings(ServingSettings):
    """All of them. The sections of the node are those of `h3_config.yaml`."""

    model_config = SettingsConfigDict(env_prefix="H3_GPU_WORKER_")

    instance: InstanceName = "gpu_worker"
    model_name: str | None = Field(default=None, min_length=1, max_length=200)
    """What users call the model. Nothing: the last part of `model.source`."""
    tiers: Literal["embedded", "services"] = "embedded"
    """Where HOST and the cold store live. `embedded`: in this process. `services`: in `nvme_io`, whose caps hold; the
    caps of `host`, and `nvme`, are not used here then."""
    nvme_io: AddressText | None = None
    """Where nvme_io serves, with `tiers` = `services`: a unix socket, beside which it passes on its regions."""
    requests_max: Count = Field(default=64, ge=1, le=4096)
    """Requests that run or wait; further ones are refused with PEER_BUSY."""
    model: ModelSettings = ModelSettings()
    device: DeviceSettings = DeviceSettings()
    host: HostSettings = HostSettings()
    attention: AttentionSettings = AttentionSettings()
    nvme: NvmeSettings = NvmeSettings()
    tiering: TieringSettings = TieringSettings()
    engine: EngineSettings = EngineSettings()
    runtime: RuntimeSettings = RuntimeSettings()

    @property
    def node(self) -> config.Settings:
        """The part that composes a node."""
        return config.Settings(
            model=self.model,
            device=self.device,
            host=self.host,
            attention=self.attention,
            nvme=self.nvme if self.tiers == "embedded" else NvmeSettings(),
            tiering=self.tiering if self.tiers == "embedded" else TieringSettings(mode="on"),
            engine=self.engine,
            runtime=self.runtime,
        )

    @property
    def owner(self) -> UnixAddress | None:
        """Where the owner of HOST serves; None where that is this process.

        Raises:
            ConfigError: it is needed and not named, or is no unix socket.
        """
        if self.tiers == "embedded":
            return None
        if not isinstance(self.nvme_io, UnixAddress):
            raise ConfigError(
                f"nvme_io = {self.nvme_io}: its tiers need its unix socket, beside which it passes memory on",
                field="nvme_io",
            )
        return self.nvme_io

    @property
    def public_model_name(self) -> str:
        """What users call the model."""
        return self.model_name or self.model.source.removeprefix("package:").rstrip("/").rpartition("/")[2]
