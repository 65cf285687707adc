"""A node put together from a loaded model, as users open it."""

import dataclasses
import os
import sys
from pathlib import Path

import pytest
import torch

from h3kv import _native
from h3kv.core.errors import ConfigError, TierClosedError
from h3kv.core.types import DType, Encoding, Tier
from h3kv.engine.config import EngineConfig
from h3kv.engine.events import Finished, TokenGenerated
from h3kv.engine.fingerprint import fingerprint_of
from h3kv.engine.needs import TieringConfig
from h3kv.engine.request import Request, SamplingParameters
from h3kv.engine.tiers import ColdPlace, TierConfig
from h3kv.models.config import ModelConfig
from h3kv.models.loader import LoadedModel
from h3kv.models.rope import RopeKind, RopeScaling
from h3kv.models.tokenizer import Tokenizer
from h3kv.models.weights import load_weights
from h3kv.node import Node
from h3kv.testing.engines import CONFIG, RandomWeights, one_thread
from h3kv.testing.tiny_models import TURN_END, byte_tokenizer
from h3kv.tiers.cold import ColdStoreConfig
from h3kv.tiers.device import DeviceStoreConfig
from h3kv.tiers.host import HostStoreConfig

STORE = DeviceStoreConfig(capacity_bytes=8 << 20)


def loaded(
    config: ModelConfig = CONFIG, *, dtype: DType = DType.FP32, seed: int = 0, device: str = "cpu"
) -> LoadedModel:
    backend = byte_tokenizer()
    config = dataclasses.replace(config, vocabulary_size=backend.get_vocab_size())
    weights = load_weights(config, RandomWeights(config, seed=seed), dtype=dtype, device=torch.device(device))
    tokenizer = Tokenizer(
        backend,
        eos_ids=frozenset({backend.token_to_id(TURN_END)}),
        special_tokens={"eos_token": TURN_END},
        chat_template=None,
        path="tiny",
    )
    return LoadedModel(Path("tiny"), config, weights, tokenizer)


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def ask(node: Node, text: str) -> tuple[str, Finished]:
    prompt = tuple(node.tokenizer.encode(text))
    answer = ""
    for event in node.engine.generate(Request(prompt=prompt, sampling=SamplingParameters(max_new_tokens=8))):
        if isinstance(event, TokenGenerated):
            answer += event.text
        if isinstance(event, Finished):
            return answer, event
    pytest.fail("no finish")


def test_memory_of_a_large_host_tier_is_committed_as_it_fills(tmp_path: Path) -> None:
    tiers = TierConfig(
        HostStoreConfig(2 << 30),
        TieringConfig(window_tokens=64, page_cache_bytes=1 << 29),
        cold=ColdPlace(tmp_path / "store", ColdStoreConfig(capacity_bytes=32 << 20)),
    )
    before_bytes = resident_bytes()
    with Node.open(loaded(), store=STORE, tiers=tiers, encoding=Encoding.K8V4) as node:
        assert node.statistics()[Tier.HOST].capacity_bytes > 2_000_000_000
        assert resident_bytes() - before_bytes < 256 << 20


@pytest.mark.slow
@pytest.mark.parametrize("dtype", list(DType))
# 24 is no multiple of 16 lanes: such heads are served in plain torch.
@pytest.mark.parametrize("head_dim", [16, 24])
def test_node_answers_and_reuses_the_document(dtype: DType, head_dim: int) -> None:
    with one_thread():
        model = loaded(dataclasses.replace(CONFIG, head_dim=head_dim), dtype=dtype)
        document = "All work and no play. " * 20
        with Node.open(model, store=STORE, engine=EngineConfig(chunk_tokens=128)) as node:
            first, _ = ask(node, document + "Why?")
            again, finished = ask(node, document + "Why?")
            assert again == first
            assert finished.statistics.cached_tokens_total == 384
            node.check_integrity()
            statistics = node.statistics()[Tier.DEVICE]
            assert 0 < statistics.used_bytes <= statistics.capacity_bytes
        with pytest.raises(TierClosedError):
            ask(node, document)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_node_on_a_gpu_answers_as_one_on_the_processor() -> None:
    document = "All work and no play. " * 20
    with Node.open(loaded(), store=STORE) as node:
        expected, _ = ask(node, document + "Why?")
    config = DeviceStoreConfig(capacity_bytes=STORE.capacity_bytes, device="cuda:0")
    with Node.open(loaded(device="cuda:0"), store=config) as node:
        assert [ask(node, document + "Why?")[0] for _ in range(2)] == [expected] * 2
        node.check_integrity()


def test_model_and_store_on_two_devices_are_refused() -> None:
    with pytest.raises(ConfigError, match="put both on one device"):
        Node.open(loaded(), store=DeviceStoreConfig(capacity_bytes=STORE.capacity_bytes, device="meta"))


def test_closing_a_node_cancels_and_closing_again_does_nothing() -> None:
    node = Node.open(loaded(), store=STORE)
    node.engine.submit(Request(prompt=(1, 2, 3)))
    node.engine.step()
    node.close()
    node.close()


def test_cap_below_one_unit_is_refused_when_the_node_opens() -> None:
    with pytest.raises(ConfigError, match="below one unit"):
        Node.open(loaded(), store=DeviceStoreConfig(capacity_bytes=1000))


@pytest.mark.skipif(sys.platform != "linux", reason="reads the kernel's list of mappings")
@pytest.mark.parametrize("head_dim", [16, 24])
def test_closed_node_has_given_its_memory_back(head_dim: int) -> None:
    node = Node.open(loaded(dataclasses.replace(CONFIG, head_dim=head_dim)), store=STORE)
    address = node.pool.segments.home.arena.data_ptr()
    assert is_mapped(address)
    node.close()
    assert not is_mapped(address)


def is_mapped(address: int) -> bool:
    """Whether the process has memory at an address."""
    ranges = (line.split()[0].split("-") for line in Path("/proc/self/maps").read_text(encoding="ascii").splitlines())
    return any(int(start, 16) <= address < int(end, 16) for start, end in ranges)


@pytest.mark.parametrize("chunk_tokens", [0, 63, 100])
def test_chunks_are_whole_blocks(chunk_tokens: int) -> None:
    with pytest.raises(ConfigError, match="multiple of 64"):
        EngineConfig(chunk_tokens=chunk_tokens)


def fingerprint(model: LoadedModel, dtype: DType = DType.FP32, kernels: str = "native") -> bytes:
    return fingerprint_of(model, dtype=dtype, encoding=Encoding.RAW, kernels=kernels).digest()


def with_token(model: LoadedModel, text: str) -> LoadedModel:
    """The model with one more token in its vocabulary."""
    model.tokenizer.backend.add_tokens([text])
    return model


def test_fingerprint_is_made_from_content() -> None:
    assert fingerprint(loaded()) == fingerprint(loaded())
    stretched = dataclasses.replace(CONFIG, rope=RopeScaling(kind=RopeKind.LINEAR, factor=2.0))
    others = [
        fingerprint(loaded(seed=1)),
        fingerprint(loaded(stretched)),
        fingerprint(loaded(dataclasses.replace(CONFIG, rope_theta=20_000.0))),
        fingerprint(loaded(dtype=DType.BF16), DType.BF16),
        fingerprint(loaded(dataclasses.replace(CONFIG, norm_eps=2e-5))),
        fingerprint(with_token(loaded(), "<other>")),
        fingerprint(loaded(), kernels="torch"),
    ]
    assert len({fingerprint(loaded()), *others}) == 1 + len(others)


def test_fingerprint_of_a_node_depends_on_the_instruction_set() -> None:
    """Sums are rounded in another order by another one."""
    before = _native.isa_current()
    fingerprints = set()
    try:
        for isa in ("portable", before):
            _native.isa_select(isa)
            with Node.open(loaded(), store=STORE) as node:
                fingerprints.add(node.engine._fingerprint)
    finally:
        _native.isa_select(before)
    assert len(fingerprints) == len({"portable", before})


def test_one_changed_weight_changes_the_fingerprint() -> None:
    changed = loaded()
    with torch.no_grad():
        changed.weights.layers[1].down.weight[3, 5] += 1e-3
    assert fingerprint(changed) != fingerprint(loaded())
