"""A channel to a process of ours: deadlines, token, request id, and errors of the tree."""

from __future__ import annotations

import time
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Self

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from h3kv.core.errors import PeerTimeoutError
from h3kv.core.units import NS_PER_S
from h3kv.rpc.addresses import Address, UnixAddress
from h3kv.rpc.credentials import NO_CREDENTIALS, Credentials, channel_credentials, check_protected
from h3kv.rpc.options import MESSAGE_BYTES_MAX, channel_options
from h3kv.rpc.outgoing import OutgoingCalls
from h3kv.rpc.status import from_call


@dataclass(frozen=True, slots=True)
class ChannelConfig:
    """How to call."""

    timeout_ns: int = 5 * NS_PER_S
    """Deadline of a call whose caller names none."""
    message_bytes_max: int = MESSAGE_BYTES_MAX


DEFAULTS: Final = ChannelConfig()


class PeerChannel:
    """Connects when it is first used, and again after its peer came back. Thread-safe.

    Stubs are made of `grpc`. Their calls raise errors of the tree and take `timeout` in seconds and `metadata`, for
    example `CallContext.metadata`. Cancelling a stream ends its iteration without an error.
    """

    def __init__(
        self,
        address: Address,
        *,
        credentials: Credentials = NO_CREDENTIALS,
        config: ChannelConfig = DEFAULTS,
    ) -> None:
        check_protected(address, credentials, setting="address")
        options = channel_options(config.message_bytes_max)
        if credentials.tls is None or isinstance(address, UnixAddress):
            self._channel = grpc.insecure_channel(address.target, options)
        else:
            secure = channel_credentials(credentials.tls, setting="address")
            self._channel = grpc.secure_channel(address.target, secure, options)
        self.address = address
        calls = OutgoingCalls(peer=str(address), token=credentials.token, timeout_ns=config.timeout_ns)
        self.grpc = grpc.intercept_channel(self._channel, calls)
        """What stubs are made of."""

    def wait_until_serving(self, *, timeout_ns: int, service: str = "") -> None:
        """Return once the peer's health says that it serves.

        Raises:
            PeerTimeoutError: it does not in that time; the message says how far it came.
        """
        stub = health_pb2_grpc.HealthStub(self._channel)
        request = health_pb2.HealthCheckRequest(service=service)
        end_ns = time.monotonic_ns() + timeout_ns
        seen = "cannot be reached"
        while (left_ns := end_ns - time.monotonic_ns()) > 0:
            answers = stub.Watch(request, timeout=left_ns / NS_PER_S, wait_for_ready=True)
            try:
                for answer in answers:
                    if answer.status == health_pb2.HealthCheckResponse.SERVING:
                        return
                    seen = "is not serving yet"
            except grpc.RpcError as error:
                # A peer that goes while it is watched is waited for again.
                if error.code() not in {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED}:
                    raise from_call(error, peer=str(self.address)) from error
            finally:
                answers.cancel()
        raise PeerTimeoutError(
            f"{self.address} {seen} after {timeout_ns / NS_PER_S:g} s: start it, or see its log", peer=str(self.address)
        )

    def close(self) -> None:
        """End the connection, and with it calls that run. Calling it again does nothing."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
