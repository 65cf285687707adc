"""What the settings of all processes of a node have in common: where they serve, whom they trust, what they tell.

A process reads the environment alone, under its own prefix: `H3_GPU_WORKER_METRICS__PORT=9402`. A section has two
underscores before each key.
"""

from __future__ import annotations

import difflib
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Final, Literal, TypeVar, get_args

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, PlainSerializer, ValidationError
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, SettingsConfigDict, SettingsError

from h3kv.config import Count, PathOrNone, Section
from h3kv.core.errors import ConfigError
from h3kv.core.units import NS_PER_S, parse_duration
from h3kv.rpc.addresses import TcpAddress, UnixAddress, parse_address
from h3kv.rpc.credentials import Credentials, TlsFiles, read_token
from h3kv.rpc.server import ServerConfig
from h3kv.telemetry.event_log import LogFormat
from h3kv.telemetry.metrics_server import MetricsAddress
from h3kv.telemetry.process_telemetry import TelemetryConfig
from h3kv.telemetry.tracing import TracingConfig

SettingsT = TypeVar("SettingsT", bound="ProcessSettings")

DELIMITER: Final = "__"

RUN_FOLDER: Final = Path("/run/h3")
"""Where the sockets of a node lie unless its settings say otherwise."""


def socket_address(name: str) -> UnixAddress | TcpAddress:
    """Where a process of this name serves by default."""
    return parse_address(f"unix://{RUN_FOLDER}/{name}.sock", field="address")


def _duration(value: object) -> object:
    return parse_duration(value) if isinstance(value, str) else value


def _address(value: object) -> object:
    if not isinstance(value, str):
        return value
    try:
        return parse_address(value, field="address")
    except ConfigError as error:
        raise ValueError(str(error)) from error


def _instance(value: str) -> str:
    if not value.isascii() or not all(letter.isalnum() or letter in "-_." for letter in value):
        raise ValueError("a name of letters, digits, '-', '_' and '.'")
    return value


Duration = Annotated[int, BeforeValidator(_duration)]
"""Nanoseconds, written with a unit: `10s`, `50us`."""

AddressText = Annotated[UnixAddress | TcpAddress, BeforeValidator(_address), PlainSerializer(str, return_type=str)]
"""`unix:///run/h3/gpu_worker.sock`, or a port of a host such as `127.0.0.1:7402`."""


InstanceName = Annotated[str, Field(min_length=1, max_length=63), AfterValidator(_instance)]
"""`ann_offload-2`."""


class MetricsSettings(Section):
    """Where Prometheus reads this process's metrics."""

    host: str = "127.0.0.1"
    """Number of an address, or `localhost`."""
    port: Annotated[int, Field(ge=0, le=0xFFFF)] | None = None
    """0: any that is free. Nothing: the one that `deploy/prometheus` asks for."""
    is_remote_allowed: bool = False
    """Whether other machines may read the page, which needs no password."""


class TracingSettings(Section):
    """Where spans go."""

    endpoint: str | None = None
    """Of a collector that speaks OTLP over gRPC: `http://jaeger:4317`. Nothing: tracing is off."""
    sampled_fraction: float = Field(default=1.0, ge=0.0, le=1.0)
    """Of the traces that begin in this process."""
    steps_per_span: Count = Field(default=32, ge=1)
    """Of so many steps of an answer, one has a span."""


class LogSettings(Section):
    """Lines on stderr."""

    format: Literal["text", "json"] = "text"
    """`json`: one object a line, for programs."""
    level: Literal["debug", "info", "warning", "error"] = "info"
    """The least that is written."""


class TlsSettings(Section):
    """PEM files. Both sides show a certificate that the authority signed."""

    certificate: Path
    """Of this process."""
    key: Path
    """Of that certificate."""
    authority: Path
    """Which signed the certificates of both sides."""


class CredentialSettings(Section):
    """What this process shows and asks of others, on ports. A unix socket needs none: its mode says who may open it."""

    token_file: PathOrNone = None
    """A file with one token of 32 characters or more, known to both sides."""
    tls: TlsSettings | None = None
    """Certificates. Nothing: no encryption."""

    def read(self) -> Credentials:
        """The credentials in those files.

        Raises:
            ConfigError: the token cannot be read, or is none.
        """
        token = None if self.token_file is None else read_token(self.token_file, setting="credentials.token_file")
        tls = None if self.tls is None else TlsFiles(self.tls.certificate, self.tls.key, self.tls.authority)
        return Credentials(token, tls)


class ProcessSettings(BaseSettings):
    """Base of the settings of a process. A subclass sets `env_prefix` and defaults."""

    model_config = SettingsConfigDict(
        env_nested_delimiter=DELIMITER, frozen=True, extra="forbid", use_attribute_docstrings=True
    )

    instance: InstanceName
    """Name of this process among those of its kind, in logs and traces."""
    metrics: MetricsSettings = MetricsSettings()
    tracing: TracingSettings = TracingSettings()
    logs: LogSettings = LogSettings()

    def telemetry(self, *, default_port: int) -> TelemetryConfig:
        """Where its telemetry goes.

        Raises:
            ConfigError: metrics would be open to other machines, or the collector's address is none.
        """
        port = default_port if self.metrics.port is None else self.metrics.port
        return TelemetryConfig(
            metrics=MetricsAddress(self.metrics.host, port, self.metrics.is_remote_allowed),
            tracing=TracingConfig(
                self.tracing.endpoint,
                sampled_fraction=self.tracing.sampled_fraction,
                steps_per_span=self.tracing.steps_per_span,
            ),
            log_format=LogFormat(self.logs.format),
            log_level=logging.getLevelNamesMapping()[self.logs.level.upper()],
        )


class ServingSettings(ProcessSettings):
    """Base of the settings of a process that serves gRPC."""

    address: AddressText
    """Where it serves: a unix socket, or a port, which needs credentials."""
    socket_group: int | None = Field(default=None, ge=0)
    """Number of a group that may open the unix socket too. Nothing: its owner alone."""
    credentials: CredentialSettings = CredentialSettings()
    drain_seconds: float = Field(default=20.0, ge=0.0, le=3600.0)
    """How long calls that run may go on after the process was told to end."""

    @property
    def drain_ns(self) -> int:
        """That time."""
        return round(self.drain_seconds * NS_PER_S)

    def server(self) -> ServerConfig:
        """Where and how it serves. Raises ConfigError."""
        return ServerConfig(self.address, credentials=self.credentials.read(), socket_group=self.socket_group)


def read_settings(kind: type[SettingsT]) -> SettingsT:
    """The settings in the environment.

    Raises:
        ConfigError: an unknown name below the prefix, or a value against its rule. The message has the variable, the
            value and the rule.
    """
    prefix = str(kind.model_config.get("env_prefix", ""))
    assert prefix, f"{kind.__name__} has no prefix"
    for variable in sorted(os.environ):
        if variable.startswith(prefix):
            _check_name(prefix, variable.removeprefix(prefix).lower().split(DELIMITER), kind.model_fields)
    try:
        return kind()
    except SettingsError as error:
        raise ConfigError(f"{error}: a section is JSON, or its keys are set one by one", field=prefix) from error
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        path = _variable_path(problem["loc"], kind)
        if problem["type"] == "extra_forbidden":
            _check_name(prefix, [*path, str(problem["loc"][-1])], kind.model_fields)
        variable = prefix + DELIMITER.join(path).upper()
        if problem["type"] == "missing" and variable not in os.environ:
            raise ConfigError(f"{variable} is not set: it is needed", field=".".join(path)) from error
        rule = problem["msg"].removeprefix("Value error, ")
        raise ConfigError(f"{variable} = {problem['input']!r}: {rule}", field=".".join(path)) from error


def describe_settings(settings: ProcessSettings) -> str:
    """The settings on one line, as JSON. Secrets lie in files, so none is among them."""
    return settings.model_dump_json(fallback=str)


def _check_name(prefix: str, parts: Sequence[str], fields: Mapping[str, FieldInfo]) -> None:
    """Raise ConfigError where one of the parts of a variable's name is no setting, or none of the section before it."""
    variable = prefix + DELIMITER.join(parts).upper()
    for at, name in enumerate(parts):
        place = prefix + "".join(part.upper() + DELIMITER for part in parts[:at])
        if name not in fields:
            near = difflib.get_close_matches(name, fields, n=1)
            hint = f"did you mean {place}{near[0].upper()}?" if near else f"known are {', '.join(sorted(fields))}"
            if not fields:
                hint = f"{place.removesuffix(DELIMITER)} has no parts"
            raise ConfigError(f"{variable}: unknown setting; {hint}", field=".".join(parts))
        section = _section_of(fields[name].annotation)
        fields = {} if section is None else section.model_fields


def _section_of(annotation: object) -> type[BaseModel] | None:
    """The section that a setting holds, perhaps one that may be left out; None where it holds none."""
    kinds = (annotation, *get_args(annotation))
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None)


def _variable_path(location: tuple[int | str, ...], kind: type[BaseModel]) -> list[str]:
    """The part of an error's place that names settings: pydantic adds the members of unions."""
    path: list[str] = []
    section: type[BaseModel] | None = kind
    for part in location:
        if section is None or part not in section.model_fields:
            continue
        path.append(str(part))
        section = _section_of(section.model_fields[str(part)].annotation)
    return path
