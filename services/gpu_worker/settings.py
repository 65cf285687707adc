"""Settings of gpu_worker: the environment below `H3_GPU_WORKER_`, and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Final, Literal

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
    PathOrNone,
    RuntimeSettings,
    Size,
    TieringSettings,
)
from h3kv.core.errors import ConfigError
from h3kv.directory.factory import MEMORY
from h3kv.document_folder import beside_store
from h3kv.rpc.addresses import UnixAddress
from h3kv.service_settings import AddressText, InstanceName, ServingSettings
from services.gpu_worker.documents_opening import DocumentConfig

CREW_SOCKET: Final = "crew.sock"


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
    offload: Literal["on", "off"] = "on"
    """Whether processes of `ann_offload` may take parts of attention and index search, with `tiers` = `services`."""
    crew: PathOrNone = None
    """Socket where they come. Nothing: `crew.sock` beside the unix socket of `address`, or else of `nvme_io`."""
    controller: AddressText | None = None
    """Where the controller serves, to which segments and what draws attention are reported, with `tiers` = `services`.
    Nothing: nobody is told, and room is made by age alone."""
    directory: str = MEMORY
    """Where tokens of tenants are counted: `memory`, for this process alone, or the URL of a Redis or Valkey server,
    the same as the controller's."""
    documents: PathOrNone = None
    """Folder where documents and their texts are kept, for its owner alone; made if it is not there. Nothing: beside
    `nvme.store`, with `tiers` = `embedded`; otherwise in memory, until this process ends."""
    documents_max: Count = Field(default=DocumentConfig().documents_max, ge=1, le=100_000)
    """Documents of one tenant."""
    document_text_bytes_max: Size = Field(default=DocumentConfig().text_bytes_max, ge=1, le=7 << 20)
    """Bytes of one text: a call carries no more than 8 MiB."""
    pinned_share_max: float = Field(default=DocumentConfig().pinned_share_max, ge=0.0, le=1.0)
    """Part of HOST and the cold store that pinned documents may take together."""
    requests_max: Count = Field(default=256, ge=1, le=4096)
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
            tiering=self.tiering if self.tiers == "embedded" else self.tiering.model_copy(update={"mode": "on"}),
            engine=self.engine,
            runtime=self.runtime,
        )

    @property
    def owner(self) -> UnixAddress | None:
        """Where the owner of HOST serves; None where that is this process.

        Raises:
            ConfigError: it is needed and not named, or is no unix socket; or there is a controller without it.
        """
        if self.tiers == "embedded":
            if self.controller is not None:
                raise ConfigError(
                    "controller: its commands come through nvme_io: set tiers to services, or leave the controller out",
                    field="controller",
                )
            return None
        if not isinstance(self.nvme_io, UnixAddress):
            raise ConfigError(
                f"nvme_io = {self.nvme_io}: its tiers need its unix socket, beside which it passes memory on",
                field="nvme_io",
            )
        return self.nvme_io

    @property
    def crew_path(self) -> Path | None:
        """Where helpers come; None where nobody may help. Raises ConfigError as `owner`."""
        owner = self.owner
        if owner is None or self.offload == "off":
            return None
        beside = self.address if isinstance(self.address, UnixAddress) else owner
        return self.crew or beside.path.with_name(CREW_SOCKET)

    @property
    def public_model_name(self) -> str:
        """What users call the model."""
        return self.model_name or self.model.source.removeprefix("package:").rstrip("/").rpartition("/")[2]

    @property
    def document_config(self) -> DocumentConfig:
        """Where documents are kept, and what bounds them."""
        folder = self.documents or (beside_store(self.nvme.store) if self.tiers == "embedded" else None)
        return DocumentConfig(folder, self.documents_max, self.document_text_bytes_max, self.pinned_share_max)
