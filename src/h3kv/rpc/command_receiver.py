"""Takes commands in the place of `nvme_io`, and says of each at once that it is done.

For `h3kv.bench.decisions` alone, which measures who gives them: no service uses it. It lies here because messages of
the protocol stay here.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import grpc

from h3kv.api.common.v1 import commands_pb2
from h3kv.api.nvme_io.v1 import nvme_io_service_pb2 as pb
from h3kv.core.types import SegmentId, Tier
from h3kv.rpc.addresses import Address
from h3kv.rpc.command_messages import MoveEnd, MoveOutcome, outcome_message
from h3kv.rpc.server import RpcServer, ServerConfig

BOTH: Final = frozenset({Tier.HOST, Tier.NVME})
COLD: Final = frozenset({Tier.NVME})


@dataclass(frozen=True, slots=True)
class ReceivedCommand:
    """A command as it came."""

    segment: SegmentId
    generation: int
    """Of the segment after it."""
    tiers: frozenset[Tier]
    """Where the segment lies after it."""
    reason: str
    """Why it was given."""
    received_ns: int
    """On the monotonic clock, when its call came."""


class CommandReceiver:
    """Serves the calls of `nvme_io` that commands come by, and no others, from `start` to `stop`.

    Args:
        address: where the controller looks for `nvme_io`.
        take: called with every command, by threads of the server.
    """

    def __init__(self, address: Address, take: Callable[[ReceivedCommand], None]) -> None:
        self._take = take
        self._server = RpcServer(ServerConfig(address))
        self._server.add(_register, self, pb.DESCRIPTOR)

    def start(self) -> None:
        """Begin to serve.

        Raises:
            AddressInUseError: someone else serves there.
        """
        self._server.start()
        self._server.announce(is_serving=True)

    def stop(self) -> None:
        """End."""
        self._server.stop(grace_ns=0)

    def promote(self, request: pb.PromoteRequest, context: grpc.ServicerContext) -> pb.PromoteResponse:
        """`Promote` of the protocol."""
        del context
        return pb.PromoteResponse(outcomes=self._end(request.commands, BOTH))

    def demote(self, request: pb.DemoteRequest, context: grpc.ServicerContext) -> pb.DemoteResponse:
        """`Demote` of the protocol."""
        del context
        return pb.DemoteResponse(outcomes=self._end(request.commands, COLD))

    def watch_moves(
        self, request: pb.WatchMovesRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.WatchMovesResponse]:
        """`WatchMoves` of the protocol. Nothing moves but by commands, whose ends are in the answers."""
        del request
        is_over = threading.Event()
        if context.add_callback(is_over.set):
            is_over.wait()
        return iter(())

    def _end(
        self, commands: Iterable[commands_pb2.Command], tiers: frozenset[Tier]
    ) -> list[commands_pb2.CommandOutcome]:
        received_ns = time.monotonic_ns()
        outcomes = []
        for command in commands:
            segment, generation = SegmentId(command.segment.segment), command.segment.generation + 1
            self._take(ReceivedCommand(segment, generation, tiers, command.reason, received_ns))
            sender, number = command.id.sender_boot_token, command.id.number
            outcomes.append(
                outcome_message(MoveOutcome(sender, number, MoveEnd.DONE, generation=generation, tiers=tiers))
            )
        return outcomes


def _register(receiver: CommandReceiver, server: grpc.Server) -> None:
    handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
        "Promote": grpc.unary_unary_rpc_method_handler(
            receiver.promote, pb.PromoteRequest.FromString, pb.PromoteResponse.SerializeToString
        ),
        "Demote": grpc.unary_unary_rpc_method_handler(
            receiver.demote, pb.DemoteRequest.FromString, pb.DemoteResponse.SerializeToString
        ),
        "WatchMoves": grpc.unary_stream_rpc_method_handler(
            receiver.watch_moves, pb.WatchMovesRequest.FromString, pb.WatchMovesResponse.SerializeToString
        ),
    }
    (service,) = pb.DESCRIPTOR.services_by_name.values()
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(service.full_name, handlers)])
