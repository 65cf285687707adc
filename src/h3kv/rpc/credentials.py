"""How a caller shows that it may call: a token, or a certificate of an authority that both sides trust.

A unix socket needs neither: its mode says who may open it.
"""

from __future__ import annotations

import hmac
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import grpc

from h3kv.core.errors import ConfigError
from h3kv.rpc.addresses import Address, TcpAddress

TOKEN_CHARACTERS_MIN: Final = 32
"""128 bits, where each hexadecimal digit carries four."""

_TOKEN: Final = re.compile(rf"[\x21-\x7e]{{{TOKEN_CHARACTERS_MIN},512}}")


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files of one side. Both sides must show a certificate that the authority signed."""

    certificate: Path
    key: Path
    authority: Path


@dataclass(frozen=True, slots=True)
class Credentials:
    """What one side presents, and asks of the other."""

    token: str | None = field(default=None, repr=False)
    """Known to both sides alone."""
    tls: TlsFiles | None = None


NO_CREDENTIALS: Final = Credentials()
"""For a unix socket."""


def read_token(path: Path, *, setting: str) -> str:
    """The token in a file, without the white space around it.

    Raises:
        ConfigError: the file cannot be read, or what it holds is no token. The message does not show it.
    """
    try:
        token = path.read_text(encoding="ascii").strip()
    except (OSError, ValueError) as error:
        raise ConfigError(f"{setting}: the token in {path} cannot be read ({error})", field=setting) from error
    if not _TOKEN.fullmatch(token):
        raise ConfigError(
            f"{setting}: {path} must hold one token of {TOKEN_CHARACTERS_MIN} to 512 printable characters without "
            "spaces: make one with `openssl rand -hex 32`",
            field=setting,
        )
    return token


def token_matches(presented: str | None, expected: str) -> bool:
    """Whether a caller knows the token, in a time that does not tell how much of it was right."""
    return hmac.compare_digest((presented or "").encode(errors="replace"), expected.encode())


def check_protected(address: Address, credentials: Credentials, *, setting: str) -> None:
    """Refuse a port that anyone could call.

    Raises:
        ConfigError: a TCP address with neither token nor certificates.
    """
    if isinstance(address, TcpAddress) and credentials.token is None and credentials.tls is None:
        raise ConfigError(
            f"{setting} = {address}: a port needs a token or certificates: name them, or use a unix socket",
            field=setting,
        )


def server_credentials(tls: TlsFiles, *, setting: str) -> grpc.ServerCredentials:
    """For a server that asks callers for their certificates. Raises ConfigError where a file cannot be read."""
    certificate, key, authority = (_read(path, setting) for path in (tls.certificate, tls.key, tls.authority))
    return grpc.ssl_server_credentials([(key, certificate)], root_certificates=authority, require_client_auth=True)


def channel_credentials(tls: TlsFiles, *, setting: str) -> grpc.ChannelCredentials:
    """For a caller that shows its certificate. Raises ConfigError where a file cannot be read."""
    certificate, key, authority = (_read(path, setting) for path in (tls.certificate, tls.key, tls.authority))
    return grpc.ssl_channel_credentials(root_certificates=authority, private_key=key, certificate_chain=certificate)


def _read(path: Path, setting: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{setting}: {path} cannot be read ({error.strerror})", field=setting) from error
