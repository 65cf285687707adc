"""An engine over the regions and the cold store of nvme_io, as a process of its own, answers as the embedded one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.integration.nvme_io_rig import NvmeIo, eventually, linked, nvme_io, settings_for

from h3kv.core.layout import CacheLayout
from h3kv.core.retrieval import RetrievalSetting
from h3kv.core.types import Encoding
from h3kv.engine.request import Request, SamplingParameters
from h3kv.telemetry import names
from h3kv.testing.engines import LAYOUT, layout_of, one_thread, prompt_tokens
from h3kv.testing.remote_rig import RemoteRig, remote_rig
from h3kv.testing.tiered_rig import tiered_rig
from h3kv.tiers.remote import RemoteColdStore
from h3kv.tiers.remote.link import NodeLink

PROMPTS = [prompt_tokens(seed, 1500) for seed in range(3)]
TOKENS = 6


@pytest.fixture(autouse=True)
def small_tensors() -> Iterator[None]:
    with one_thread():
        yield


Act = Callable[[NodeLink, RemoteRig], None]


def with_engine(server: NvmeIo, encoding: Encoding, act: Act) -> None:
    """Run an engine over the server's regions. When this returns, nothing of them is mapped here."""
    layout = layout_of(encoding)
    with linked(server, layout=layout) as link:
        run_rig(link, layout, act)


def run_rig(
    link: NodeLink,
    layout: CacheLayout,
    act: Act,
    *,
    retrieval: RetrievalSetting | None = None,
    page_cache_bytes: int = 0,
) -> None:
    with remote_rig(link, layout=layout, retrieval=retrieval, page_cache_bytes=page_cache_bytes) as remote:
        act(link, remote)


def cold_of(remote: RemoteRig) -> RemoteColdStore:
    cold = remote.tiers.stores.cold
    assert isinstance(cold, RemoteColdStore)
    return cold


def embedded_answers(folder: Path, encoding: Encoding) -> list[list[int]]:
    folder.mkdir()
    with tiered_rig(folder, layout=layout_of(encoding)) as rig:
        return [rig.answer(prompt, max_new_tokens=TOKENS)[0] for prompt in PROMPTS]


def answers(remote: RemoteRig) -> list[list[int]]:
    return [remote.rig.answer(prompt, max_new_tokens=TOKENS)[0] for prompt in PROMPTS]


@pytest.mark.parametrize("encoding", [Encoding.RAW, Encoding.K8V4])
def test_answers_are_those_of_the_embedded_node_also_after_restarts_of_either_side(
    tmp_path: Path, encoding: Encoding
) -> None:
    expected = embedded_answers(tmp_path / "embedded", encoding)

    def restart_under(link: NodeLink, remote: RemoteRig) -> None:
        cold = cold_of(remote)
        assert answers(remote) == expected
        remote.rig.pool.placer.settle(10**10)
        visible = cold.statistics().slabs_visible
        assert visible > 0
        server.kill()
        server.start()
        eventually(lambda: link.sessions_total == 2 or link.fault is not None, "no second session")
        assert link.fault is None
        cold.poll()
        assert cold.statistics().slabs_visible == visible, "segments were lost on the way"
        tokens, finished = remote.rig.answer(PROMPTS[0], max_new_tokens=TOKENS)
        assert tokens == expected[0]
        assert finished.statistics.cached_tokens_total > 0
        remote.rig.pool.check_integrity()

    def begin_anew(_: NodeLink, remote: RemoteRig) -> None:
        assert cold_of(remote).statistics().slabs_visible > 0
        assert answers(remote) == expected
        remote.rig.pool.check_integrity()

    with nvme_io(tmp_path, **settings_for(layout_of(encoding))) as server:
        with_engine(server, encoding, restart_under)
        with_engine(server, encoding, begin_anew)
        assert server.end() == 0


def test_no_call_and_no_lease_is_waited_for_while_tokens_are_made(tmp_path: Path) -> None:
    """Segments are opened and sealed in units that were leased between steps."""

    def decode(link: NodeLink, remote: RemoteRig) -> None:
        sampling = SamplingParameters(max_new_tokens=1500, ignore_eos=True)
        stock = remote.tiers.stock

        def is_stocked() -> bool:
            remote.tiers.tick()
            return len(stock._stock) == stock._keep

        eventually(is_stocked, "the stock is never full")
        remote.rig.engine.submit(Request(prompt=tuple(PROMPTS[0][:200]), sampling=sampling))
        remote.rig.engine.step()
        eventually(is_stocked, "the stock is not filled again")
        waits = stock.waits_total
        while remote.rig.engine.has_work:
            remote.rig.engine.step()
            remote.tiers.tick()
        assert stock.waits_total == waits
        assert link.calls.calls_total < 100

    with nvme_io(tmp_path, **settings_for(LAYOUT, host_blocks=128)) as server:
        with_engine(server, Encoding.RAW, decode)
        assert server.end() == 0


def test_retrieval_reads_its_pages_through_the_server(tmp_path: Path) -> None:
    """Indexes and single pages land in regions of the server, in slots of this process."""
    layout, retrieval = layout_of(Encoding.K8V4), RetrievalSetting(budget_tokens=128)
    page_cache_bytes = 4 * layout.slab.size_bytes(16)
    prompt = prompt_tokens(1, 2500)
    (tmp_path / "embedded").mkdir()
    with tiered_rig(
        tmp_path / "embedded", layout=layout, retrieval=retrieval, page_cache_bytes=page_cache_bytes, host_blocks=64
    ) as rig:
        expected = rig.answer(prompt, max_new_tokens=100)[0]

    def answer(link: NodeLink, remote: RemoteRig) -> None:
        assert remote.rig.answer(prompt, max_new_tokens=100)[0] == expected
        assert remote.rig.pool.pages is not None
        assert remote.rig.telemetry.value(names.PAGE_CACHE_TAKEN, outcome="missed") > 0
        remote.rig.pool.check_integrity()

    with nvme_io(tmp_path, **settings_for(layout, host_blocks=64)) as server:
        with linked(server, layout=layout) as link:
            run_rig(link, layout, answer, retrieval=retrieval, page_cache_bytes=page_cache_bytes)
        assert server.end() == 0
