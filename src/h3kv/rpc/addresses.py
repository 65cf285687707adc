"""Where a process serves: a unix socket, or a port of a host."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias

from h3kv.core.errors import ConfigError

UNIX: Final = "unix://"
UNIX_PATH_BYTES_MAX: Final = 107
"""What the kernel's `sockaddr_un` takes, without the zero at its end."""
PORT_MAX: Final = 65_535

_HOST: Final = re.compile(r"(?:[A-Za-z0-9](?:[A-Za-z0-9.-]{0,251}[A-Za-z0-9])?|\[[0-9A-Fa-f:.]{2,45}\])")


@dataclass(frozen=True, slots=True)
class UnixAddress:
    """A socket file."""

    path: Path
    """Absolute."""

    @property
    def target(self) -> str:
        """As gRPC writes it."""
        return f"unix:{self.path}"

    def __str__(self) -> str:
        return f"{UNIX}{self.path}"


@dataclass(frozen=True, slots=True)
class TcpAddress:
    """A port."""

    host: str
    """Name or number; an IPv6 number in brackets."""
    port: int
    """0: any that is free, for a server alone."""

    @property
    def target(self) -> str:
        """As gRPC writes it."""
        return f"{self.host}:{self.port}"

    def __str__(self) -> str:
        return self.target


Address: TypeAlias = UnixAddress | TcpAddress


def parse_address(text: str, *, field: str) -> Address:
    """The address that a text means: `unix:///run/h3/nvme_io.sock` or `127.0.0.1:7401`.

    Args:
        text: what was configured.
        field: name of the setting, for the message.

    Raises:
        ConfigError: it is neither; the message says why.
    """
    return _unix(text, field) if text.startswith(UNIX) else _tcp(text, field)


def _unix(text: str, field: str) -> UnixAddress:
    path = text.removeprefix(UNIX)
    if not path.startswith("/") or path.endswith("/") or "\0" in path:
        raise ConfigError(f"{field} = {text!r}: after {UNIX} comes the absolute path of a socket file", field=field)
    if (size_bytes := len(path.encode(errors="surrogateescape"))) > UNIX_PATH_BYTES_MAX:
        raise ConfigError(
            f"{field} = {text!r}: the path has {size_bytes} bytes, the system takes {UNIX_PATH_BYTES_MAX}: shorten it",
            field=field,
        )
    return UnixAddress(Path(path))


def _tcp(text: str, field: str) -> TcpAddress:
    host, colon, port = text.rpartition(":")
    is_port = port.isascii() and port.isdigit() and len(port) <= len(str(PORT_MAX)) and int(port) <= PORT_MAX
    if not (colon and is_port and _HOST.fullmatch(host)):
        raise ConfigError(
            f"{field} = {text!r}: must be {UNIX}/path/of/socket or host:port with a port up to {PORT_MAX}", field=field
        )
    return TcpAddress(host, int(port))
