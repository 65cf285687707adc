"""HTTP/1.1 as a load driver needs it: one request at a time on a connection, bodies as they come, little work for each.

It shares the processor with the servers that it measures: bytes are looked at once, and nothing is built that is not
asked for.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Self
from urllib.parse import urlsplit

from h3kv.core.errors import ConfigError, PeerUnavailableError

LINE_MAX: Final = 16 << 20
"""Bytes of one line: an event with the usage of a long answer is far below."""
CONNECT_S: Final = 60.0
SCHEMES: Final = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server answers."""

    host: str
    port: int
    prefix: str = ""
    """Of its paths."""
    is_tls: bool = False

    def __str__(self) -> str:
        return f"{self.host}:{self.port}{self.prefix}"


def parse_address(url: str) -> Address:
    """The address in a URL; `/v1` at its end is the API's own and no prefix.

    Raises:
        ConfigError: it is no URL of HTTP.
    """
    parts = urlsplit(url)
    if parts.scheme not in SCHEMES or not parts.hostname:
        raise ConfigError(f"url = {url}: must be like http://127.0.0.1:8000", field="url")
    prefix = parts.path.rstrip("/").removesuffix("/v1")
    try:
        port = parts.port or SCHEMES[parts.scheme]
    except ValueError as error:
        raise ConfigError(f"url = {url}: {error}; correct the port", field="url") from error
    return Address(parts.hostname, port, prefix, parts.scheme == "https")


@dataclass(frozen=True, slots=True)
class Head:
    """How an answer begins."""

    status: int
    headers: Mapping[str, str]
    """Names in lower case."""


class Connection:
    """One connection that is used again; opened by the first request, and once more where the server closed it.

    Args:
        address: of the server.
        key: sent as a bearer token.
    """

    def __init__(self, address: Address, *, key: str | None = None) -> None:
        self.address = address
        self._key = key
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Give the connection up, in the middle of an answer too."""
        if self._streams is None:
            return
        writer = self._streams[1]
        self._streams = None
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()

    async def request(self, method: str, path: str, fields: Mapping[str, object] | None = None) -> Head:
        """Send a request and read how the answer begins. What it says is read with `lines` or `body`, to its end,
        before the next request; or the connection is closed.

        Raises:
            PeerUnavailableError: nobody answers there.
        """
        message = self._message(method, path, fields)
        was_open = self._streams is not None
        try:
            return await self._exchange(message)
        except (OSError, EOFError, ValueError) as error:
            await self.close()
            if not was_open:
                raise self._gone(error) from error
        # A server may close a connection on which nothing happens, at the moment in which a request is sent.
        try:
            return await self._exchange(message)
        except (OSError, EOFError, ValueError) as error:
            await self.close()
            raise self._gone(error) from error

    async def lines(self, head: Head) -> AsyncIterator[bytes]:
        """The lines of an answer, without their ends.

        Raises:
            PeerUnavailableError: the server went away before the answer's end.
        """
        rest = b""
        async for piece in self._pieces(head):
            *whole, rest = (rest + piece).split(b"\n")
            for line in whole:
                yield line.rstrip(b"\r")
        if rest:
            yield rest

    async def body(self, head: Head) -> bytes:
        """All of an answer.

        Raises:
            PeerUnavailableError: the server went away before its end.
        """
        return b"".join([piece async for piece in self._pieces(head)])

    async def _exchange(self, message: bytes) -> Head:
        if self._streams is None:
            async with asyncio.timeout(CONNECT_S):
                self._streams = await asyncio.open_connection(
                    self.address.host, self.address.port, limit=LINE_MAX, ssl=self.address.is_tls or None
                )
        reader, writer = self._streams
        writer.write(message)
        await writer.drain()
        return parse_head(await reader.readuntil(b"\r\n\r\n"))

    async def _pieces(self, head: Head) -> AsyncIterator[bytes]:
        if self._streams is None:
            raise self._gone(EOFError("the connection was closed"))
        reader = self._streams[0]
        try:
            if head.headers.get("transfer-encoding", "").lower() == "chunked":
                while size := int((await reader.readuntil(b"\r\n")).partition(b";")[0], 16):
                    yield (await reader.readexactly(size + 2))[:-2]
                while await reader.readuntil(b"\r\n") != b"\r\n":
                    pass  # trailers
            elif (length := head.headers.get("content-length")) is not None:
                yield await reader.readexactly(int(length))
            else:
                yield await reader.read()
                await self.close()
        except (OSError, EOFError, ValueError) as error:
            await self.close()
            raise self._gone(error) from error
        if head.headers.get("connection", "").lower() == "close":
            await self.close()

    def _message(self, method: str, path: str, fields: Mapping[str, object] | None) -> bytes:
        body = b"" if fields is None else json.dumps(fields, separators=(",", ":")).encode()
        lines = [f"{method} {self.address.prefix}{path} HTTP/1.1", f"Host: {self.address.host}:{self.address.port}"]
        if body:
            lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
        if self._key is not None:
            lines.append(f"Authorization: Bearer {self._key}")
        return "\r\n".join([*lines, "", ""]).encode() + body

    def _gone(self, error: BaseException) -> PeerUnavailableError:
        said = str(error) or type(error).__name__
        return PeerUnavailableError(f"{self.address} does not answer: {said}", peer=str(self.address))


def parse_head(head: bytes) -> Head:
    """Status and headers, from the bytes up to the empty line.

    Raises:
        ValueError: it is not HTTP.
    """
    first, *lines = head.decode("latin-1").split("\r\n")
    version, _, status = first.partition(" ")
    if not version.startswith("HTTP/1."):
        raise ValueError(f"no HTTP: {first[:40]!r}")
    pairs = [line.partition(":") for line in lines if line]
    return Head(int(status[:3]), {name.strip().lower(): value.strip() for name, _, value in pairs})
