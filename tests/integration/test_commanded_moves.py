"""gpu_worker in the controller's loop: what it reports decides where its segments lie, and commands move them.

Real processes: nvme_io, migration_controller, gpu_worker and gateway, over a tiny model.
"""

from __future__ import annotations

import contextlib
import itertools
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.integration.controller_rig import ControllerProcess
from tests.integration.nvme_io_rig import NvmeIo, nvme_io
from tests.integration.service_rig import PROMPT, Rig, running, wait_for

from h3kv.api.common.v1 import commands_pb2, types_pb2
from h3kv.api.migration_controller.v1 import migration_controller_service_pb2 as view_pb
from h3kv.api.migration_controller.v1 import migration_controller_service_pb2_grpc as view_grpc
from h3kv.api.nvme_io.v1 import nvme_io_service_pb2 as nvme
from h3kv.api.nvme_io.v1 import nvme_io_service_pb2_grpc as nvme_grpc
from h3kv.core.errors import H3Error
from h3kv.core.limits import BLOCK_TOKENS
from h3kv.core.units import NS_PER_S
from h3kv.rpc.client import ChannelConfig, PeerChannel
from h3kv.testing.tiny_models import write_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

LONG = f"{PROMPT * 3}What does Jack lack?"
SENDER = b"t" * 16
PATIENT = ChannelConfig(timeout_ns=60 * NS_PER_S)
"""A call on a busy machine may take long: only what it answers counts."""
HOST, NVME = types_pb2.TIER_HOST, types_pb2.TIER_NVME
RULES = "H3_MIGRATION_CONTROLLER_RULES__"
STRICT = {
    f"{RULES}WATERMARK_HIGH": "0.01",
    f"{RULES}WATERMARK_LOW": "0.0",
    f"{RULES}PROMOTE_FREE_FRACTION_MIN": "1.0",
    f"{RULES}DISPLACE_MARGIN": "1000.0",
}
"""Rules by which everything idle leaves HOST, and nothing comes back but by use."""
STEADY = {f"{RULES}JITTER_NS_MAX": "1000000000.0", f"{RULES}PROMOTE_FREE_FRACTION_MIN": "1.0"}
"""Rules by which nothing moves in a HOST that is not full."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    write_tiny_model(folder, max_position_embeddings=2048)
    return folder


@dataclass
class Node:
    """All of it, and what tests ask of it."""

    owner: NvmeIo
    controller: ControllerProcess
    rig: Rig
    view_stub: view_grpc.MigrationControllerServiceStub
    store_stub: nvme_grpc.NvmeIoServiceStub
    numbers: Iterator[int]
    prompt_blocks: int = 0
    """Whole blocks of the prompt that was asked."""

    def ask(self) -> tuple[str, dict[str, int]]:
        fields = self.rig.complete(prompt=LONG, max_tokens=16).fields
        assert "choices" in fields, fields
        self.prompt_blocks = fields["usage"]["prompt_tokens"] // BLOCK_TOKENS
        return fields["choices"][0]["text"], fields["usage"]["h3"]["cached_tokens"]

    def segments(self) -> dict[int, view_pb.SegmentState]:
        """As the controller knows them."""
        view = self.view_stub.GetView(view_pb.GetViewRequest(page_size=1_000))
        return {each.state.segment.segment: each.state for each in view.segments}

    def places(self) -> dict[int, tuple[int, ...]]:
        return {number: tuple(sorted(state.tiers)) for number, state in self.segments().items()}

    def settle(self, *tiers: int) -> dict[int, view_pb.SegmentState]:
        """What the controller knows once all of the prompt was reported to lie in these tiers alone."""

        def is_settled() -> bool:
            states = self.segments().values()
            is_whole = sum(each.blocks for each in states) >= self.prompt_blocks
            return is_whole and all(sorted(each.tiers) == list(tiers) and not each.pins for each in states)

        wait_for(is_settled, what=f"all segments to lie in {tiers}")
        return self.segments()

    def command(
        self, segment: types_pb2.SegmentRef, *, number: int | None = None, generation: int | None = None
    ) -> commands_pb2.Command:
        ref = types_pb2.SegmentRef()
        ref.CopyFrom(segment)
        ref.generation = segment.generation if generation is None else generation
        return commands_pb2.Command(
            id=commands_pb2.CommandId(sender_boot_token=SENDER, number=number or next(self.numbers)),
            segment=ref,
            timeout_ns=20 * NS_PER_S,
            reason="by_hand",
        )

    def carry_out(self, call: Any, request: Any) -> commands_pb2.CommandOutcome:
        """How the one command of a request ended: the relay answers a repetition by that."""
        found: list[commands_pb2.CommandOutcome] = []

        def has_ended() -> bool:
            found[:] = call(request).outcomes
            return found[0].outcome != commands_pb2.OUTCOME_RELAYED

        wait_for(has_ended, what="a command to end")
        return found[0]

    def demote(self, command: commands_pb2.Command) -> commands_pb2.CommandOutcome:
        return self.carry_out(self.store_stub.Demote, nvme.DemoteRequest(commands=[command]))

    def promote(self, command: commands_pb2.Command) -> commands_pb2.CommandOutcome:
        return self.carry_out(self.store_stub.Promote, nvme.PromoteRequest(commands=[command]))


@contextlib.contextmanager
def node(folder: Path, model: Path, **rules: str) -> Iterator[Node]:
    controller = ControllerProcess(folder, **rules)
    address = str(controller.address)
    settings = {
        "TIERS": "services",
        "NVME_IO": f"unix://{folder / 'nvme_io.sock'}",
        "CONTROLLER": address,
        "DEVICE__WINDOW_TOKENS": 128,
    }
    with contextlib.ExitStack() as stack:
        stack.callback(controller.kill)
        owner = stack.enter_context(nvme_io(folder, HOST_BYTES="64MiB", CAPACITY="64MiB", CONTROLLER=address))
        rig = stack.enter_context(running(folder, model, worker=settings))
        view, store = (
            stack.enter_context(PeerChannel(each, config=PATIENT)).grpc for each in (controller.address, owner.address)
        )
        yield Node(
            owner,
            controller,
            rig,
            view_grpc.MigrationControllerServiceStub(view),
            nvme_grpc.NvmeIoServiceStub(store),
            itertools.count(1),
        )


def test_idle_segments_are_demoted_by_command_and_found_on_nvme(model: Path, tmp_path: Path) -> None:
    with node(tmp_path, model, **STRICT) as held:
        expected, _ = held.ask()
        held.settle(NVME)
        text, cached = held.ask()
        assert text == expected
        assert cached["nvme"] > 0
        assert cached["host"] == 0
        decisions = held.view_stub.GetDecisions(view_pb.GetDecisionsRequest(count=1_000))
        done = [each for each in decisions.decisions if each.outcome.outcome == commands_pb2.OUTCOME_DONE]
        assert {each.command.reason for each in done} == {"watermark"}
        assert decisions.totals["watermark"] >= len(done) > 0
        log = held.controller.log.read_text()
        assert "decided" in log and "h3.reason=watermark" in log
        assert held.controller.stop() == 0, log


def test_answers_go_on_without_the_controller_which_knows_everything_again_afterwards(
    model: Path, tmp_path: Path
) -> None:
    with node(tmp_path, model, **STEADY) as held:
        expected, _ = held.ask()
        before = held.settle(HOST, NVME)
        held.controller.process.send_signal(signal.SIGKILL)
        held.controller.process.wait()
        text, cached = held.ask()
        assert (text, cached.get("nvme", 0)) == (expected, 0)
        held.controller.start()
        wait_for(lambda: before.keys() <= held.segments().keys(), what="the controller to know all segments")
        after = held.settle(HOST, NVME)
        assert {number: state.segment.generation for number, state in before.items()}.items() <= {
            number: state.segment.generation for number, state in after.items()
        }.items()


def test_commands_move_segments_once_and_stale_ones_do_nothing(model: Path, tmp_path: Path) -> None:
    with node(tmp_path, model, **STEADY) as held:
        expected, _ = held.ask()
        state = max(held.settle(HOST, NVME).values(), key=lambda each: each.size_bytes)
        number, ref = state.segment.segment, state.segment
        assert set(state.tiers) == {HOST, NVME}
        stale = held.demote(held.command(ref, generation=ref.generation + 1))
        assert (stale.outcome, stale.generation) == (commands_pb2.OUTCOME_STALE, ref.generation)
        down = held.command(ref)
        done = held.demote(down)
        assert (done.outcome, list(done.tiers)) == (commands_pb2.OUTCOME_DONE, [NVME])
        assert done.generation > ref.generation
        wait_for(lambda: held.places()[number] == (NVME,), what="the demotion to be reported")
        assert held.promote(held.command(ref)).outcome == commands_pb2.OUTCOME_STALE
        back = held.promote(held.command(held.segments()[number].segment))
        assert back.outcome == commands_pb2.OUTCOME_DONE
        assert held.demote(down) == done, "its first outcome is given again"
        wait_for(lambda: held.places()[number] == (HOST, NVME), what="the promotion to be reported")
        late = held.command(held.segments()[number].segment)
        late.timeout_ns = 0
        assert held.demote(late).outcome == commands_pb2.OUTCOME_EXPIRED
        assert held.ask()[0] == expected


def test_commands_come_again_after_their_relay_was_killed(model: Path, tmp_path: Path) -> None:
    with node(tmp_path, model, **STEADY) as held:
        expected, _ = held.ask()
        state = max(held.settle(HOST, NVME).values(), key=lambda each: each.size_bytes)
        held.owner.kill()
        held.owner.start()
        held.owner.wait_until_serving()

        def is_demoted() -> bool:
            with contextlib.suppress(H3Error):
                outcome = held.demote(held.command(state.segment)).outcome
                return outcome == commands_pb2.OUTCOME_DONE
            return False

        wait_for(is_demoted, what="a command to be carried out")
        assert held.ask()[0] == expected


def test_pins_of_running_sequences_are_seen_at_the_owner_of_the_memory(model: Path, tmp_path: Path) -> None:
    with node(tmp_path, model, **STEADY) as held:
        held.ask()

        def pins() -> int:
            clients = held.store_stub.GetStatistics(nvme.GetStatisticsRequest()).clients
            return sum(each.pins for each in clients)

        wait_for(lambda: pins() == 0, what="pins to be given back")
        stream = held.rig.stream(prompt=LONG, max_tokens=900)
        reader = threading.Thread(target=lambda: list(stream.events()))
        reader.start()
        wait_for(lambda: pins() > 0, what="pins of a running sequence")
        reader.join()
        wait_for(lambda: pins() == 0, what="pins to be given back")
