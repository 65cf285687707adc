"""Settings of the gateway: the environment below `H3_GATEWAY_`, and nothing else."""

from __future__ import annotations

from typing import Annotated, Final

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from h3kv.config import Count, PathOrNone, Section, Size
from h3kv.core.client_limits import DOCUMENT_TEXT_BYTES_MAX
from h3kv.core.units import NS_PER_S
from h3kv.rpc.options import MESSAGE_BYTES_MAX
from h3kv.service_settings import AddressText, CredentialSettings, InstanceName, ProcessSettings

BODY_BYTES_MAX: Final = MESSAGE_BYTES_MAX - (256 << 10)
"""What a body holds goes on in one message, with a little more."""


class HttpSettings(Section):
    """Where clients are answered."""

    host: str = "127.0.0.1"
    """Name or number of an address of this machine."""
    port: Annotated[int, Field(ge=0, le=0xFFFF)] = 8000
    """0: any that is free; the log says which."""
    is_remote_allowed: bool = False
    """Whether the host may be one that other machines reach. Without `tenants_file`, all of them may use the node."""
    socket: PathOrNone = None
    """A unix socket in place of host and port, for its owner alone."""
    body_max: Annotated[Size, Field(ge=1024, le=BODY_BYTES_MAX)] = 4 << 20
    """Largest body of a request. A million tokens of text fit."""
    document_max: Annotated[Size, Field(ge=1024, le=BODY_BYTES_MAX)] = DOCUMENT_TEXT_BYTES_MAX + (1 << 20)
    """Largest body with a document: the longest text, and what JSON adds. One message carries it on to `gpu_worker`."""
    body_seconds: float = Field(default=30.0, gt=0.0, le=3600.0)
    """For the head of a request to arrive, for its body, and between two looks whether a client that has something to
    read took any of it. Slower ones are given up."""
    requests_max: Count = Field(default=256, ge=1)
    """Requests at a time; further ones get status 429. `/health` and `/metrics` do not count."""
    connections_max: Count = Field(default=1024, ge=1)
    """Connections at a time; further ones are closed at once."""
    names: tuple[str, ...] = ()
    """Where no key is needed: names by which clients call this node, beside its addresses and `localhost`, and hosts
    whose pages may ask. Other ones are refused; with `is_remote_allowed` and no names, only pages of other hosts."""


class Settings(ProcessSettings):
    """All of them."""

    model_config = SettingsConfigDict(env_prefix="H3_GATEWAY_")

    instance: InstanceName = "gateway"
    http: HttpSettings = HttpSettings()
    worker: AddressText
    """Where gpu_worker serves: `unix:///run/h3/gpu_worker.sock`, or a port, which needs credentials."""
    credentials: CredentialSettings = CredentialSettings()
    tenants_file: PathOrNone = None
    """YAML with tenants, hashes of their API keys and their quotas, read at start. Nothing: no key is needed, and all
    clients are one tenant."""
    request_seconds: float = Field(default=3600.0, gt=0.0, le=86_400.0)
    """How long an answer may take, from its request to its last token."""
    drain_seconds: float = Field(default=20.0, ge=0.0, le=3600.0)
    """How long answers that run may go on after the process was told to end."""

    @property
    def request_ns(self) -> int:
        """How long an answer may take."""
        return round(self.request_seconds * NS_PER_S)

    @property
    def body_ns(self) -> int:
        """How long a client may take with its part."""
        return round(self.http.body_seconds * NS_PER_S)
