"""A gRPC server as every process of ours runs one."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeVar

import grpc
from google.protobuf.descriptor import FileDescriptor
from grpc_reflection.v1alpha import reflection

from h3kv.core.errors import AddressInUseError
from h3kv.core.units import NS_PER_S
from h3kv.rpc.addresses import Address, TcpAddress, UnixAddress
from h3kv.rpc.credentials import NO_CREDENTIALS, Credentials, check_protected, server_credentials
from h3kv.rpc.guard import CallGuard
from h3kv.rpc.health import SERVICE_NAME, Health
from h3kv.rpc.options import MESSAGE_BYTES_MAX, server_options
from h3kv.rpc.unix_socket import SocketClaim

ServicerT = TypeVar("ServicerT")

SETTING: Final = "address"
"""What messages call the server's address."""

CANCEL_NS: Final = NS_PER_S
"""For handlers to notice that their call was cancelled."""


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """Where and how to serve."""

    address: Address
    credentials: Credentials = NO_CREDENTIALS
    """A TCP address needs a token or certificates."""
    socket_group: int | None = None
    """Group that may open the unix socket besides its owner."""
    threads: int = 16
    """Handlers that run at a time. A stream takes one for as long as it is open."""
    calls_max: int = 64
    """Calls that run or wait for a thread; further ones are refused with PEER_BUSY."""
    message_bytes_max: int = MESSAGE_BYTES_MAX
    has_reflection: bool = False
    """Whether callers may ask for the protocol: for development."""


class RpcServer:
    """Serves from `start` to `stop`. Health says NOT_SERVING until `announce`.

    Handlers raise errors of the tree. One that streams must end soon after its caller has gone, which
    `context.add_callback` tells it. Such a callback runs on the thread that everything else of the server waits for:
    it may take no lock under which anything is sent.
    """

    def __init__(self, config: ServerConfig) -> None:
        check_protected(config.address, config.credentials, setting=SETTING)
        self._config = config
        self._pool = concurrent.futures.ThreadPoolExecutor(config.threads, thread_name_prefix="rpc")
        self._health = Health()
        self._claim: SocketClaim | None = None
        self._address = config.address
        self._is_stopped = False
        self._guard = CallGuard(config.credentials.token)
        self._server = grpc.server(
            self._pool,
            interceptors=[self._guard],
            options=server_options(config.message_bytes_max),
            maximum_concurrent_rpcs=config.calls_max,
        )

    @property
    def address(self) -> Address:
        """Where it serves. A port that was left open is known after `start`."""
        return self._address

    def add(
        self, register: Callable[[ServicerT, grpc.Server], None], servicer: ServicerT, protocol: FileDescriptor
    ) -> None:
        """Serve the services of a protocol file, before `start`.

        Args:
            register: the generated `add_..._to_server`.
            servicer: thread-safe: its methods run on many threads.
            protocol: `DESCRIPTOR` of the generated module.
        """
        register(servicer, self._server)
        for service in protocol.services_by_name.values():
            self._health.add(service.full_name)

    def start(self) -> None:
        """Bind and answer calls.

        Raises:
            AddressInUseError: another process serves there.
            ConfigError: the address, the socket's group or a certificate cannot be used.
        """
        self._health.register(self._server)
        if self._config.has_reflection:
            names = (*self._health.services, SERVICE_NAME, reflection.SERVICE_NAME)
            reflection.enable_server_reflection(names, self._server)
        if isinstance(self._config.address, UnixAddress):
            self._claim = SocketClaim(self._config.address)
        try:
            self._bind()
        except BaseException:
            self._let_go()
            raise
        self._server.start()

    def announce(self, *, is_serving: bool) -> None:
        """Tell health checks whether calls are welcome."""
        self._health.announce(is_serving=is_serving)

    def stop(self, *, grace_ns: int) -> bool:
        """Refuse new calls, wait so long for those that run, then cancel them. Calling it again only waits.

        Returns:
            Whether every handler has ended, a moment after it was cancelled at the latest. One that hangs keeps its
            thread, and the interpreter at its exit.
        """
        if not self._is_stopped:
            self._is_stopped = True
            self._health.end()
        self._server.stop(grace_ns / NS_PER_S).wait((grace_ns + CANCEL_NS) / NS_PER_S)
        have_ended = self._guard.wait_until_idle(CANCEL_NS)
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._let_go()
        return have_ended

    def _bind(self) -> None:
        config = self._config
        if self._claim is not None:
            with self._claim.binding(group=config.socket_group):
                self._server.add_insecure_port(config.address.target)
            return
        assert isinstance(config.address, TcpAddress)
        tls = config.credentials.tls
        secure = None if tls is None else server_credentials(tls, setting=SETTING)
        target = config.address.target
        try:
            if secure is None:
                port = self._server.add_insecure_port(target)
            else:
                port = self._server.add_secure_port(target, secure)
        except RuntimeError as error:
            raise AddressInUseError(
                f"nothing can be served at {target}: end what serves there, or name another port", address=target
            ) from error
        self._address = TcpAddress(config.address.host, port)

    def _let_go(self) -> None:
        if self._claim is not None:
            self._claim.release()
            self._claim = None
