"""Settings of migration_controller: the environment below `H3_MIGRATION_CONTROLLER_`, and nothing else."""

from __future__ import annotations

import hashlib
import re
import socket
from dataclasses import replace
from typing import Final

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from h3kv.config import Count, Section, Size
from h3kv.core.units import NS_PER_S
from h3kv.directory.factory import MEMORY
from h3kv.policy.migration_config import DEVICE_HOST, HOST_NVME, MigrationConfig
from h3kv.rpc.server import ServerConfig
from h3kv.service_settings import AddressText, Duration, ServingSettings, socket_address

STREAMS_MAX: Final = 64
"""Processes of a node that report, with a few calls besides: each stream takes a thread."""

NODE_NAME_MAX: Final = 31
"""Characters: in the directory the name of a process follows, and both have 64."""


def machine_name(host: str) -> str:
    """A name for the directory of what a machine calls itself, which may be anything; long ones stay apart."""
    plain = re.sub(r"[^A-Za-z0-9._-]+", "-", host).strip("._-") or "node"
    if len(plain) <= NODE_NAME_MAX:
        return plain
    digest = hashlib.sha256(plain.encode()).hexdigest()[:8]
    return f"{plain[: NODE_NAME_MAX - 9]}-{digest}"


_RULES: Final = MigrationConfig()


class RuleSettings(Section):
    """Thresholds of the rules. Durations with units (`10s`), sizes with units (`64MiB`)."""

    has_device: bool = False
    """Whether segments move between DEVICE and HOST too. Leave it off: `gpu_worker` of this version refuses such moves,
    since no device holds whole segments."""
    tick: Duration = _RULES.tick_ns
    """Length of a tick: the rules run at least so often, and byte budgets are for one."""
    eviction_threshold: Duration = _RULES.eviction_threshold_ns
    """A segment that was not touched for so long is idle."""
    jitter_ns_max: float = _RULES.jitter_ns_max
    """Standard deviation of an access to a fast tier, in ns, above which idle segments leave it."""
    jitter_used_fraction_min: float = _RULES.jitter_used_fraction_min
    """Used share of a fast tier down to which jitter makes them leave."""
    promote_free_fraction_min: float = _RULES.promote_free_fraction_min
    """Free share of a fast tier below which a place must be earned."""
    promote_touches_in_row: int = _RULES.promote_touches_in_row
    """Ticks in a row in which a segment must be touched to earn a place."""
    touch_mass_min: float = _RULES.touch_mass_min
    """Share of a tick's attention from which a segment counts as touched."""
    displace_margin: float = _RULES.displace_margin
    """How many times hotter it must be than what goes for it."""
    watermark_high: float = _RULES.watermark_high
    """Used share of a fast tier from which idle segments leave it."""
    watermark_low: float = _RULES.watermark_low
    """Used share at which they stop leaving."""
    hysteresis: Duration = _RULES.hysteresis_ns
    """For how long a segment that was moved is not moved back."""
    promote_bytes_per_tick: Size = _RULES.promote_bytes_per_tick
    """Bytes that promotions of a tick may move."""
    demote_bytes_per_tick: Size = _RULES.demote_bytes_per_tick
    """Bytes that demotions of a tick may move."""
    command_timeout: Duration = _RULES.command_timeout_ns
    """After which a command is void."""
    commands_in_flight_max: int = _RULES.commands_in_flight_max
    """Commands under way at a time."""

    def config(self) -> MigrationConfig:
        """For the rules. Raises ConfigError where values contradict each other."""
        same = {name: getattr(self, name) for name in type(self).model_fields if hasattr(_RULES, name)}
        timed = {
            f"{name}_ns": getattr(self, name)
            for name in ("tick", "eviction_threshold", "hysteresis", "command_timeout")
        }
        pairs = (DEVICE_HOST, HOST_NVME) if self.has_device else (HOST_NVME,)
        return MigrationConfig(pairs=pairs, **same, **timed)


class Settings(ServingSettings):
    """All of them."""

    model_config = SettingsConfigDict(env_prefix="H3_MIGRATION_CONTROLLER_")

    instance: str = "migration_controller"
    address: AddressText = socket_address("migration_controller")
    """Where it serves: a unix socket, or a port, which needs credentials."""
    nvme_io: AddressText = socket_address("nvme_io")
    """Who carries out moves between HOST and NVME."""
    gpu_worker: AddressText = socket_address("gpu_worker")
    """Who carries out moves between DEVICE and HOST."""
    directory: str = MEMORY
    """`memory`, or the URL of a Redis or Valkey server."""
    node: str = Field(
        default_factory=lambda: machine_name(socket.gethostname()),
        pattern=rf"^[A-Za-z0-9][A-Za-z0-9._-]{{0,{NODE_NAME_MAX - 1}}}$",
    )
    """Name of this machine in the directory."""
    silence: Duration = 5 * NS_PER_S
    """A process whose stream has been closed for so long is gone, with its segments."""
    decisions_kept: Count = Field(default=4_096, ge=1, le=1_000_000)
    """Decisions that `GetDecisions` can still give."""
    drain_seconds: float = Field(default=1.0, ge=0.0, le=3600.0)
    """How long calls that run may go on after the process was told to end. Streams of reports are cancelled then."""
    rules: RuleSettings = RuleSettings()

    def server(self) -> ServerConfig:
        """See `ServingSettings.server`."""
        return replace(super().server(), threads=STREAMS_MAX, calls_max=2 * STREAMS_MAX)
