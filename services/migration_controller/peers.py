"""Commands on their way to the processes that carry them out. Nobody waits for those.

enqueue -> waiting --pump--> call under way --answer--> outcomes
              ^                      |
              +-- peer gone, busy ---+     again after a pause, until the command's deadline: it acts once
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import grpc

from h3kv.api.common.v1 import commands_pb2, types_pb2
from h3kv.api.gpu_worker.v1 import gpu_worker_service_pb2 as gpu
from h3kv.api.gpu_worker.v1 import gpu_worker_service_pb2_grpc as gpu_grpc
from h3kv.api.nvme_io.v1 import nvme_io_service_pb2 as nvme
from h3kv.api.nvme_io.v1 import nvme_io_service_pb2_grpc as nvme_grpc
from h3kv.core.error_codes import Retry
from h3kv.core.errors import H3Error, InternalError, PeerCancelledError
from h3kv.core.types import BlockKey, Tier
from h3kv.core.units import NS_PER_MS, NS_PER_S
from h3kv.policy.migration_state import Command, Direction
from h3kv.rpc.call_context import CallContext
from h3kv.rpc.client import PeerChannel
from h3kv.rpc.command_messages import MoveEnd, MoveOutcome, read_move_outcome
from h3kv.rpc.convert import COMMANDS_MAX

BACKOFF_NS: Final = (50 * NS_PER_MS, NS_PER_S)
"""Between two attempts at a peer that is gone: at first, and at most."""


class Executor(enum.Enum):
    """Who carries a command out."""

    NVME_IO = "nvme_io"
    """Between HOST and NVME."""
    GPU_WORKER = "gpu_worker"
    """Between DEVICE and HOST."""


def executor_of(command: Command) -> Executor:
    """Who carries it out: whoever owns the tier that is not HOST."""
    return Executor.GPU_WORKER if Tier.DEVICE in {command.source, command.target} else Executor.NVME_IO


@dataclass(frozen=True, slots=True)
class Order:
    """A command, with what its message needs besides."""

    command: Command
    key: BlockKey
    owner_boot_token: bytes
    context: CallContext


@dataclass(frozen=True, slots=True)
class Answer:
    """A call that ended. `outcomes` is for the loop's thread."""

    peer: Executor
    orders: tuple[Order, ...]
    call: Any
    """Has `result`, as calls of stubs have it."""


class Peer:
    """One process that carries commands out. For one thread; answers come from gRPC's.

    Args:
        name: which.
        channel: to it. Stays the caller's.
        boot_token: of this controller: names its commands.
        answered: called from any thread when a call has ended; gives the answer to the loop.
    """

    def __init__(
        self, name: Executor, channel: PeerChannel, *, boot_token: bytes, answered: Callable[[Answer], None]
    ) -> None:
        self._name = name
        self._boot_token = boot_token
        self._answered = answered
        stub: Any = (
            nvme_grpc.NvmeIoServiceStub(channel.grpc)
            if name is Executor.NVME_IO
            else gpu_grpc.GpuWorkerServiceStub(channel.grpc)
        )
        messages: Any = nvme if name is Executor.NVME_IO else gpu
        self._calls = {
            Direction.PROMOTE: (stub.Promote, messages.PromoteRequest),
            Direction.DEMOTE: (stub.Demote, messages.DemoteRequest),
        }
        self._waiting: deque[Order] = deque()
        self._backoff_ns = 0
        self._retry_ns = 0

    @property
    def next_due_ns(self) -> int | None:
        """When `pump` would do something; None: not before another event."""
        return self._retry_ns if self._waiting else None

    def enqueue(self, order: Order) -> None:
        """Send a command with the next `pump`. The rules bound how many there are."""
        self._waiting.append(order)

    def pump(self, now_ns: int) -> None:
        """Send what waits, unless the peer rests. What is void by now is dropped: the rules forget it by the clock."""
        if not self._waiting or now_ns < self._retry_ns:
            return
        timely = [each for each in self._waiting if each.command.deadline_ns > now_ns]
        self._waiting.clear()
        for batch in _batches(timely):
            self._send(batch, now_ns)

    def outcomes(self, answer: Answer, now_ns: int) -> list[MoveOutcome]:
        """What an answer says of each order. Those that may be sent again wait for it and have none."""
        try:
            response = answer.call.result()
            read = [read_move_outcome(each, field="outcomes") for each in response.outcomes]
        except (H3Error, grpc.FutureCancelledError) as error:
            return self._failed(answer, error, now_ns)
        self._backoff_ns = self._retry_ns = 0
        by_number = {each.number: each for each in read if each.sender_boot_token == self._boot_token}
        missing = InternalError(f"{self._name.value} said nothing about a command")
        return [by_number.get(each.command.id) or self._outcome(each, missing) for each in answer.orders]

    def _failed(self, answer: Answer, error: H3Error | grpc.FutureCancelledError, now_ns: int) -> list[MoveOutcome]:
        if isinstance(error, H3Error) and error.retry is not Retry.NO:
            first_ns, longest_ns = BACKOFF_NS
            self._backoff_ns = min(max(2 * self._backoff_ns, first_ns), longest_ns)
            self._retry_ns = now_ns + self._backoff_ns
            self._waiting.extendleft(reversed(answer.orders))
            return []
        known = error if isinstance(error, H3Error) else PeerCancelledError("given up", peer=self._name.value)
        return [self._outcome(each, known) for each in answer.orders]

    def _outcome(self, order: Order, error: H3Error) -> MoveOutcome:
        return MoveOutcome(self._boot_token, order.command.id, MoveEnd.FAILED, error_reason=error.reason)

    def _send(self, batch: Sequence[Order], now_ns: int) -> None:
        stub, request = self._calls[batch[0].command.direction]
        left_ns = max(each.command.deadline_ns for each in batch) - now_ns
        call = stub.future(
            request(commands=[self._message(each, now_ns) for each in batch]),
            timeout=left_ns / NS_PER_S,
            metadata=batch[0].context.metadata,
        )
        answer = Answer(self._name, tuple(batch), call)
        call.add_done_callback(lambda _: self._answered(answer))

    def _message(self, order: Order, now_ns: int) -> commands_pb2.Command:
        command = order.command
        return commands_pb2.Command(
            id=commands_pb2.CommandId(sender_boot_token=self._boot_token, number=command.id),
            segment=types_pb2.SegmentRef(
                key=order.key,
                segment=command.segment,
                owner_boot_token=order.owner_boot_token,
                generation=command.generation,
            ),
            timeout_ns=command.deadline_ns - now_ns,
            reason=command.reason.value,
        )


def _batches(orders: Sequence[Order]) -> list[list[Order]]:
    """Those of one direction and one trace together, each in the order given, as many as a call takes.

    Directions need no order between them: what is promoted into room that a demotion makes is commanded after its end.
    """
    alike: dict[tuple[Direction, CallContext], list[Order]] = {}
    for order in orders:
        alike.setdefault((order.command.direction, order.context), []).append(order)
    return [each[at : at + COMMANDS_MAX] for each in alike.values() for at in range(0, len(each), COMMANDS_MAX)]
