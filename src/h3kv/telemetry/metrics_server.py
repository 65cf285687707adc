"""Serves a page of metrics over HTTP: `GET /metrics`, nothing else."""

from __future__ import annotations

import http.server
import ipaddress
import logging
import socket
import socketserver
import threading
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final

from h3kv.core.errors import AddressInUseError, ConfigError
from h3kv.telemetry.metric import Service
from h3kv.telemetry.metrics_page import MetricsPage

PATH: Final = "/metrics"
CONNECTIONS_MAX: Final = 16
"""At a time; further ones are closed at once. A scraper needs one, and people who look another."""
IDLE_S: Final = 5.0
"""For which a connection may say nothing."""
STOP_POLL_S: Final = 0.1
"""After which the server notices that it should stop."""

DEFAULT_PORTS: Final = {
    Service.GATEWAY: 9401,
    Service.GPU_WORKER: 9402,
    Service.NVME_IO: 9403,
    Service.ANN_OFFLOAD: 9404,
    Service.MIGRATION_CONTROLLER: 9405,
}
"""Where each service serves its metrics unless it is told otherwise, and where `deploy/prometheus` asks. They differ:
the processes of a pod share one address."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class MetricsAddress:
    """Where to serve.

    Raises:
        ConfigError: the host is not of this machine alone, and that was not allowed.
    """

    host: str = "127.0.0.1"
    """A number, or `localhost`."""
    port: int = 0
    """0: any that is free."""
    is_remote_allowed: bool = False
    """Whether other machines may read it: the page needs no password."""

    def __post_init__(self) -> None:
        if self.host != "localhost":
            try:
                number = ipaddress.ip_address(self.host)
            except ValueError as error:
                raise ConfigError(
                    f"metrics.host = {self.host!r}: must be the number of an address, such as 127.0.0.1 or 0.0.0.0",
                    field="metrics.host",
                ) from error
            if not number.is_loopback and not self.is_remote_allowed:
                raise ConfigError(
                    f"metrics.host = {self.host}: other machines could read the metrics there without a password: name "
                    "127.0.0.1, or allow it with metrics.is_remote_allowed",
                    field="metrics.host",
                )
        if not 0 <= self.port <= 0xFFFF:
            raise ConfigError(f"metrics.port = {self.port}: must be 0 to 65535", field="metrics.port")


class MetricsServer:
    """Serves from `start` to `stop`, on threads of its own."""

    def __init__(self, page: MetricsPage, address: MetricsAddress) -> None:
        self._page = page
        self._address = address
        self._server: _Server | None = None
        self._thread: threading.Thread | None = None

    @property
    def url(self) -> str:
        """Of the page. A port that was left open is known after `start`."""
        host = f"[{self._address.host}]" if ":" in self._address.host else self._address.host
        port = self._address.port if self._server is None else self._server.server_address[1]
        return f"http://{host}:{port}{PATH}"

    @property
    def port(self) -> int:
        """Where it serves, after `start`."""
        assert self._server is not None, "it serves between start and stop"
        return int(self._server.server_address[1])

    def start(self) -> None:
        """Bind and answer.

        Raises:
            AddressInUseError: nothing can be served there.
        """
        place = f"{self._address.host}:{self._address.port}"
        kind = _Server6 if ":" in self._address.host else _Server
        try:
            self._server = kind((self._address.host, self._address.port), self._page)
        except OSError as error:
            message = f"metrics cannot be served at {place} ({error}): end what serves there, or set metrics.port"
            raise AddressInUseError(message, address=place) from error
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(STOP_POLL_S,), name="metrics", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """Close the port. A page that is being sent is not waited for. Calling it again does nothing."""
        if self._server is None or self._thread is None:
            return
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
        self._server = self._thread = None


class _Server(socketserver.ThreadingMixIn, socketserver.TCPServer):
    allow_reuse_address = True
    daemon_threads = True

    def __init__(self, place: tuple[str, int], page: MetricsPage) -> None:
        self.page = page
        self._rooms = threading.BoundedSemaphore(CONNECTIONS_MAX)
        super().__init__(place, _Handler)

    def verify_request(self, request: Any, client_address: Any) -> bool:
        del request, client_address
        return self._rooms.acquire(blocking=False)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._rooms.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        del request, client_address
        _log.debug("a reader of metrics went away", exc_info=True)


class _Server6(_Server):
    address_family = socket.AF_INET6


class _Handler(http.server.BaseHTTPRequestHandler):
    timeout = IDLE_S
    server: _Server

    def do_GET(self) -> None:
        if self.path.partition("?")[0] != PATH:
            self.send_error(HTTPStatus.NOT_FOUND, f"the metrics are at {PATH}")
            return
        body, content_type = self.server.page.render(self.headers.get("Accept", ""))
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, template: str, *args: Any) -> None:
        _log.debug(template, *args)
