"""Decode with attention spread over a process of its own, beside the same node alone.

    embedded    one process: threads of the native core attend to everything
    services    HOST lies in a shared region, and one process of `services.ann_offload` takes units of it

Both nodes run the same model in this process and decode the same prompt, in turns. What lies on the device is attended
to here in both; of the rest, `services.helped_fraction` is what the other process computed.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from h3kv.attention.crew import CrewHub
from h3kv.attention.offload import OffloadStatistics, SpreadAttention
from h3kv.bench.measure import Rounds
from h3kv.bench.results import Results
from h3kv.bench.service_process import service_process
from h3kv.bench.texts import NamedText, take_tokens
from h3kv.bench.tiered import TieredSetting, TokenCaps, kv_bytes, kv_layout, label, load_reaching, open_tiered
from h3kv.core.errors import PeerUnavailableError
from h3kv.core.types import DType, Encoding
from h3kv.core.units import NS_PER_MS, NS_PER_S
from h3kv.engine.config import EngineConfig
from h3kv.engine.events import Event, PrefillProgress, TokenGenerated
from h3kv.engine.needs import TieringConfig
from h3kv.engine.request import Request, SamplingParameters
from h3kv.engine.tiers import TierConfig
from h3kv.memory.region import SHARED_KINDS, Region
from h3kv.memory.region_format import OpaqueGeometry, RegionIdentity
from h3kv.memory.region_hub import RegionHub
from h3kv.memory.work_area import PURPOSE, WorkArea, WorkGeometry
from h3kv.models.loader import LoadedModel
from h3kv.node import Node
from h3kv.rpc.addresses import UnixAddress
from h3kv.tiers.device import DeviceStoreConfig
from h3kv.tiers.host import HostStoreConfig, RegionStore

HELPER_START_NS: Final = 60 * NS_PER_S
"""Until the helping process has joined."""
_POLL_NS: Final = 50 * NS_PER_MS


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is measured."""

    prompt_tokens: int
    rounds: int
    round_tokens: int
    """Decoded by each node in each round."""
    caps: TokenCaps


FULL: Final = Sizes(
    8192, 15, 16, TokenCaps(device_tokens=2048, window_tokens=1024, host_tokens=12_288, chunk_tokens=896)
)
QUICK: Final = Sizes(3072, 3, 8, TokenCaps(device_tokens=1024, window_tokens=512, host_tokens=6144, chunk_tokens=448))


def decode_speed(results: Results, setting: TieredSetting, sizes: Sizes, *, named: NamedText) -> None:
    """Put `services.decode_speed_fraction`, both rates, and which part the other process computed.

    Args:
        results: where they go.
        setting: model, and a folder for sockets.
        sizes: how much.
        named: text to read.

    Raises:
        ConfigError: the text is too short, or `services` is not there: the wheel leaves it out.
        PeerUnavailableError: the helping process does not come up.
    """
    answer_tokens = (sizes.rounds + 1) * sizes.round_tokens
    model = load_reaching(setting.model, dtype=DType.BF16, context_tokens=sizes.prompt_tokens + answer_tokens)
    prompt = take_tokens(model, named, sizes.prompt_tokens)
    with contextlib.ExitStack() as stack:
        embedded = stack.enter_context(open_tiered(model, sizes.caps, store=None, encoding=Encoding.K8V4))
        shared = stack.enter_context(SharedNode.open(model, sizes.caps, folder=setting.folder))
        decoders = {
            "embedded": Decode(embedded, prompt, answer_tokens, setting=setting, name="embedded"),
            "services": Decode(shared.node, prompt, answer_tokens, setting=setting, name="services"),
        }
        before = shared.spread.statistics()
        rounds = Rounds.run(
            {name: functools.partial(decode.rate, sizes.round_tokens) for name, decode in decoders.items()},
            repetitions=sizes.rounds,
        )
        after = shared.spread.statistics()
    prefix = f"services.{label(sizes.prompt_tokens)}"
    for name in decoders:
        results.put(f"{prefix}.{name}_tokens_per_s", rounds.median(name))
    results.put(f"{prefix}.helped_fraction", _helped_fraction(before, after))
    results.put("services.decode_speed_fraction", rounds.ratio("services", "embedded"))
    tokens = min(len(decode.tokens) for decode in decoders.values())
    equal = decoders["embedded"].tokens[:tokens] == decoders["services"].tokens[:tokens]
    results.put(f"{prefix}.tokens_equal", float(equal))


def _helped_fraction(before: OffloadStatistics, after: OffloadStatistics) -> float:
    units = after.units - before.units
    return (after.units_helped - before.units_helped) / units if units else 0.0


class Decode:
    """An answer that is decoded piece by piece."""

    def __init__(
        self, node: Node, prompt: Sequence[int], answer_tokens: int, *, setting: TieredSetting, name: str
    ) -> None:
        sampling = SamplingParameters(max_new_tokens=answer_tokens, ignore_eos=True)
        self._events: Iterator[Event] = node.engine.generate(Request(prompt=tuple(prompt), sampling=sampling))
        self.tokens: list[int] = []
        for event in self._events:
            if isinstance(event, PrefillProgress):
                setting.progress(f"{name}: {event.done_tokens} of {event.prompt_tokens} tokens read")
            if isinstance(event, TokenGenerated):
                self.tokens.append(event.token)
                break

    def rate(self, tokens: int) -> float:
        """Decode so many more, and give back how many in a second."""
        start_ns = time.perf_counter_ns()
        wanted = len(self.tokens) + tokens
        while len(self.tokens) < wanted:
            event = next(self._events)
            if isinstance(event, TokenGenerated):
                self.tokens.append(event.token)
        return tokens * NS_PER_S / (time.perf_counter_ns() - start_ns)


class SharedNode:
    """A node whose HOST lies in a region that one helping process has mapped."""

    def __init__(self, node: Node, spread: SpreadAttention) -> None:
        self.node = node
        self.spread = spread

    @classmethod
    @contextlib.contextmanager
    def open(cls, model: LoadedModel, caps: TokenCaps, *, folder: Path) -> Iterator[SharedNode]:
        """The node, once the process helps.

        Raises:
            ConfigError: `services` is not there.
            PeerUnavailableError: the process does not come up.
        """
        token = os.urandom(16)
        geometry = WorkGeometry()
        with contextlib.ExitStack() as stack:
            node = stack.enter_context(_open_node(model, caps, RegionIdentity(1, "host", token)))
            work = Region.create(
                OpaqueGeometry(geometry.size_bytes), identity=RegionIdentity(2, PURPOSE, token), kinds=SHARED_KINDS
            )
            stack.callback(work.close)
            hub = RegionHub.open(folder / "regions.sock", boot_token=token)
            stack.callback(hub.close)
            hub.adopt(0)
            store = node.pool.home
            assert isinstance(store, RegionStore)
            hub.serve([store.region, work])
            spread = SpreadAttention(WorkArea.open(work.slots, geometry))
            stack.callback(spread.close)
            crew = CrewHub(folder / "crew.sock", spread)
            stack.callback(crew.close)
            joined = stack.enter_context(_served(hub, crew))
            stack.enter_context(_helper(folder, joined))
            node.pool.attend_with(spread)
            yield cls(node, spread)


def _open_node(model: LoadedModel, caps: TokenCaps, identity: RegionIdentity) -> Node:
    layout = kv_layout(model, Encoding.K8V4)
    host = HostStoreConfig(kv_bytes(layout, caps.host_tokens), kinds=SHARED_KINDS, identity=identity)
    tiering = TieringConfig(window_tokens=caps.window_tokens, chunk_tokens=caps.chunk_tokens)
    return Node.open(
        model,
        store=DeviceStoreConfig(kv_bytes(layout, caps.device_tokens)),
        tiers=TierConfig(host, tiering, None),
        engine=EngineConfig(caps.chunk_tokens),
        encoding=Encoding.K8V4,
    )


@contextlib.contextmanager
def _served(hub: RegionHub, crew: CrewHub) -> Iterator[threading.Event]:
    """A thread that lets processes in, as `nvme_io` and `gpu_worker` do. Gives what says that one has joined."""
    ends, joined = threading.Event(), threading.Event()

    def serve() -> None:
        while not ends.is_set():
            hub.poll(_POLL_NS)
            if crew.poll(_POLL_NS):
                joined.set()

    thread = threading.Thread(target=serve, name="hubs")
    thread.start()
    try:
        yield joined
    finally:
        ends.set()
        thread.join()


@contextlib.contextmanager
def _helper(folder: Path, joined: threading.Event) -> Iterator[None]:
    """One process of `services.ann_offload`, from when it helps."""
    settings = {"REGIONS": str(folder / "regions.sock"), "CREW": str(folder / "crew.sock")}
    with service_process("ann_offload", UnixAddress(folder / "ann_offload.sock"), settings):
        if not joined.wait(HELPER_START_NS / NS_PER_S):
            message = "services.ann_offload did not begin to help: run it by hand to see why"
            raise PeerUnavailableError(message, peer="ann_offload")
        yield
