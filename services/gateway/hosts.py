"""Whom a browser may be when it asks without a key.

A page of a stranger can make the browser of someone who works at this machine ask the node, also through a name that
the stranger lets lead to 127.0.0.1. Such requests say where they come from: in `Host` and in `Origin`.
"""

from __future__ import annotations

import ipaddress
from typing import Final
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Receive, Scope, Send

from services.gateway.problems import plain_response

FORBIDDEN: Final = 403
LOCAL: Final = "localhost"


class HostCheck:
    """Wraps the application: refuses requests that a page of a stranger may have caused.

    Args:
        app: what answers.
        names: of this node, beside addresses and `localhost`.
        is_any_host_fine: whether `Host` is not looked at: behind a unix socket, or where everybody may ask by any name.
        open_paths: that are answered anyway.
    """

    def __init__(
        self, app: ASGIApp, *, names: frozenset[str], is_any_host_fine: bool, open_paths: frozenset[str]
    ) -> None:
        self._app = app
        self._names = names
        self._is_any_host_fine = is_any_host_fine
        self._open_paths = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As ASGI says."""
        refusal = None
        if scope["type"] == "http" and scope["path"] not in self._open_paths:
            headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
            refusal = self._refusal(headers.get(b"host", ""), headers.get(b"origin"))
        app = self._app if refusal is None else plain_response(FORBIDDEN, refusal)
        await app(scope, receive, send)

    def _refusal(self, host: str, origin: str | None) -> str | None:
        """What speaks against a request; None: nothing."""
        named = _name_of(f"//{host}")
        if not (self._is_any_host_fine or named in self._names or _is_local(named) or _is_address(named)):
            return f"host = {host[:100]!r}: this node is not called so: use its address, or add it to http.names"
        if origin is None:
            return None
        asking = _name_of(origin)
        if asking and (asking == named or asking in self._names or _is_local(asking)):
            return None
        return f"origin = {origin[:100]!r}: pages of other sites may not ask here: add it to http.names if it may"


def _name_of(url: str) -> str:
    """The host in a URL, in small letters; empty where there is none."""
    try:
        return (urlsplit(url).hostname or "").rstrip(".")
    except ValueError:
        return ""


def _is_local(name: str) -> bool:
    if name == LOCAL or name.endswith(f".{LOCAL}"):
        return True
    return _is_address(name) and ipaddress.ip_address(name).is_loopback


def _is_address(name: str) -> bool:
    """A number leads where it says: nobody can give it another meaning."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
