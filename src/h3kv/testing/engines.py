"""An engine over a tiny random decoder, with every part at hand.

Its vocabulary is the 256 bytes and one end token. Weights depend on the seed only, so that two rigs of one seed are one
model. The KV of a block takes 32 KiB.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from h3kv.attention import native
from h3kv.attention.page_seams import PageKernels
from h3kv.core.hashing import Fingerprint
from h3kv.core.layout import CacheLayout, PageLayout, SlabLayout
from h3kv.core.ports import AddressableStore, Clock
from h3kv.core.retrieval import RetrievalSetting
from h3kv.core.types import DType, Encoding
from h3kv.engine.config import EngineConfig
from h3kv.engine.directory import MemoryDirectory
from h3kv.engine.engine import Engine
from h3kv.engine.events import Failed, Finished, TokenGenerated
from h3kv.engine.needs import TieringConfig
from h3kv.engine.pool import KvPool
from h3kv.engine.request import Request, RequestId, SamplingParameters
from h3kv.engine.segments import SegmentTable
from h3kv.engine.sequence import LanguageModel
from h3kv.models.config import Family, ModelConfig
from h3kv.models.decoder import Decoder
from h3kv.models.rope import RopeScaling
from h3kv.models.torch_kernels import TorchKernels
from h3kv.models.weights import expected_shapes, load_weights
from h3kv.telemetry.recorder import Recorder
from h3kv.testing.clock import ManualClock
from h3kv.tiers.device import DeviceStore, DeviceStoreConfig

END_TOKEN = 256

CONFIG = ModelConfig(
    family=Family.LLAMA,
    vocabulary_size=END_TOKEN + 1,
    hidden_size=64,
    intermediate_size=96,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=16,
    norm_eps=1e-5,
    rope_theta=10_000.0,
    rope=RopeScaling(),
    max_context=8192,
    tied_embeddings=True,
    qkv_bias=False,
    output_bias=False,
    mlp_bias=False,
    qk_norm=False,
)


def layout_of(encoding: Encoding, config: ModelConfig = CONFIG) -> CacheLayout:
    """Geometry of the tiny model's KV."""
    page = PageLayout(DType.FP32, config.head_dim, encoding)
    return CacheLayout(SlabLayout(page, config.kv_heads), layers=config.layers)


LAYOUT = layout_of(Encoding.RAW)

FINGERPRINT = Fingerprint(
    weights="tiny-0", dtype=DType.FP32, rope="default", tokenizer="bytes", encoding=Encoding.RAW, fidelity="exact"
).digest()


class RandomWeights:
    """Satisfies `models.weights.WeightSource`: every tensor of a config, filled from a seed."""

    path = "random weights"

    def __init__(self, config: ModelConfig, *, seed: int = 0) -> None:
        self._shapes = expected_shapes(config)
        self._seeds = {name: seed * len(self._shapes) + place for place, name in enumerate(self._shapes)}

    def names(self) -> Iterable[str]:
        """See `WeightSource.names`."""
        return self._shapes

    def shape(self, name: str) -> tuple[int, ...]:
        """See `WeightSource.shape`."""
        return self._shapes[name]

    def read(self, name: str) -> Tensor:
        """See `WeightSource.read`. Scaled so that logits spread over several units."""
        shape = self._shapes[name]
        noise = torch.randn(shape, generator=torch.Generator().manual_seed(self._seeds[name]))
        return 2.0 / math.sqrt(shape[-1]) * noise if len(shape) == 2 else 1.0 + 0.3 * noise


@functools.cache
def tiny_decoder(seed: int = 0, config: ModelConfig = CONFIG) -> Decoder:
    """The decoder of every rig with this seed and config."""
    weights = load_weights(config, RandomWeights(config, seed=seed), dtype=DType.FP32, device=torch.device("cpu"))
    return Decoder(config, weights, TorchKernels())


class ByteVocabulary:
    """Satisfies `engine.sequence.Vocabulary`: a token is a byte, and one is special."""

    eos_ids = frozenset({END_TOKEN})
    special_ids = frozenset({END_TOKEN})

    def token_bytes(self, token: int) -> bytes:
        """The byte; of the end token, its name."""
        return bytes([token]) if token < END_TOKEN else b"<end>"


@dataclass(frozen=True, slots=True)
class Rig:
    """An engine and what it stands on."""

    engine: Engine
    pool: KvPool
    directory: MemoryDirectory
    store: AddressableStore
    telemetry: Recorder
    clock: Clock

    @property
    def segments(self) -> SegmentTable:
        """Of the pool."""
        return self.pool.segments

    def run(self) -> dict[RequestId, Finished]:
        """Step until nothing is left to do; how each request finished. Raises what one failed with."""
        finished: dict[RequestId, Finished] = {}
        while self.engine.has_work:
            for event in self.engine.step():
                if isinstance(event, Failed):
                    raise event.error
                if isinstance(event, Finished):
                    finished[event.request] = event
        return finished

    def answer(
        self, prompt: Sequence[int], *, max_new_tokens: int = 4, tenant: bytes = b""
    ) -> tuple[list[int], Finished]:
        """Greedy tokens after a prompt, and how it finished."""
        sampling = SamplingParameters(max_new_tokens=max_new_tokens, ignore_eos=True)
        tokens: list[int] = []
        for event in self.engine.generate(Request(prompt=tuple(prompt), sampling=sampling, tenant=tenant)):
            if isinstance(event, TokenGenerated):
                tokens.append(event.token)
            if isinstance(event, Finished):
                return tokens, event
        raise AssertionError("the stream ended without Finished")

    def check_idle(self) -> None:
        """Assert that nothing runs and nothing is pinned, and that the cache can be given up to the last byte."""
        self.engine.check_integrity()
        assert not self.engine.has_work
        assert self.segments.statistics().pins == 0
        self.engine.evict_cached()
        assert self.store.statistics().used_bytes == 0
        assert self.store.statistics().slabs_visible == 0
        assert len(self.directory) == 0
        self.engine.check_integrity()


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Tensors as small as these gain nothing from threads, and lose much where the cores are busy."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def tiny_store(capacity_blocks: int, layout: CacheLayout = LAYOUT) -> DeviceStore:
    """A store for so many blocks of the tiny model over all its layers."""
    return DeviceStore(layout.slab, DeviceStoreConfig(capacity_bytes=capacity_blocks * layout.block_bytes))


def make_rig(
    *,
    capacity_blocks: int = 128,
    chunk_tokens: int = 128,
    model: LanguageModel | None = None,
    store: AddressableStore | None = None,
    page_kernels: PageKernels = native,
    fingerprint: bytes = FINGERPRINT,
    layout: CacheLayout = LAYOUT,
    window_tokens: int = 1024,
    retrieval: RetrievalSetting | None = None,
) -> Rig:
    """An engine over a store of its own.

    Args:
        capacity_blocks: of the store that is made where none is given.
        chunk_tokens: prompt tokens of one step.
        model: the tiny decoder of seed 0 where None.
        store: for slabs of the layout.
        page_kernels: must reach the store's addresses.
        fingerprint: of the block keys.
        layout: of the tiny model's KV.
        window_tokens: newest tokens that are always read exactly.
        retrieval: of the answers.
    """
    store = tiny_store(capacity_blocks, layout) if store is None else store
    telemetry, directory, clock = Recorder(), MemoryDirectory(), ManualClock(step_ns=1_000_000)
    pool = KvPool(
        store,
        layout,
        page_kernels=page_kernels,
        directory=directory,
        telemetry=telemetry,
        clock=ManualClock(),
        tiering=TieringConfig(window_tokens=window_tokens),
    )
    engine = Engine(
        tiny_decoder() if model is None else model,
        pool,
        vocabulary=ByteVocabulary(),
        fingerprint=fingerprint,
        device=torch.device("cpu"),
        config=EngineConfig(chunk_tokens=chunk_tokens, retrieval=retrieval),
        clock=clock,
        telemetry=telemetry,
    )
    return Rig(engine, pool, directory, store, telemetry, clock)


def prompt_tokens(seed: int, count: int) -> list[int]:
    """A prompt of random bytes."""
    generator = torch.Generator().manual_seed(seed)
    return [int(token) for token in torch.randint(0, END_TOKEN, (count,), generator=generator)]
