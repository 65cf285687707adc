"""A Ctrl-C at any line of what moves blocks between two steps: everything comes back in the end."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from h3kv.core.layout import CacheLayout, PageLayout, SlabLayout
from h3kv.core.retrieval import RetrievalSetting
from h3kv.core.types import DType, Encoding, Tier
from h3kv.engine.sequence_kv import SequenceKv
from h3kv.sequence_pool import Caps, SequencePool
from h3kv.testing.engines import layout_of, prompt_tokens
from h3kv.testing.interrupting import InterruptAt
from h3kv.testing.tiered_rig import tiered_rig

LAYOUT = CacheLayout(slab=SlabLayout(page=PageLayout(DType.FP32, 16, Encoding.RAW), kv_heads=1), layers=2)
MODULES = ("h3kv.sequence_pool", "h3kv.engine.sequence_kv", "h3kv.engine.window", "h3kv.engine.interrupts")


def _read(pool: SequencePool, sequence: SequenceKv, tokens: int) -> None:
    pool.prepare([sequence], [tokens])
    states = torch.zeros(tokens, 1, 16)
    for layer in range(LAYOUT.layers):
        pool.append(sequence, layer, states, states)
    sequence.advance(tokens)


@pytest.mark.slow
def test_an_interrupt_at_any_line_of_preparing_loses_no_room() -> None:
    caps: Caps = {"device_bytes": 16 * LAYOUT.block_bytes, "host_bytes": 64 * LAYOUT.block_bytes, "window_tokens": 64}
    pool = SequencePool(LAYOUT, device=torch.device("cpu"), caps=caps)
    for line in itertools.count(1):
        sequence = pool.open_sequence()
        _read(pool, sequence, 192)
        interrupt = InterruptAt(line, MODULES)
        try:
            with interrupt:
                pool.prepare([sequence], [65])
        except KeyboardInterrupt:
            pass
        _read(pool, sequence, 65)
        assert sequence.tokens == 257
        pool.close_sequence(sequence)
        pool.check_integrity()
        assert pool.statistics()[Tier.DEVICE].used_bytes == 0
        if not interrupt.came:
            break
    pool.close()


@pytest.mark.slow
def test_an_interrupt_at_any_line_of_taking_pages_leaves_none_pinned_when_the_request_has_ended(tmp_path: Path) -> None:
    prompt = prompt_tokens(5, 3000)
    setting = RetrievalSetting(budget_tokens=128)
    cold = {"layout": layout_of(Encoding.K8V4), "retrieval": setting, "host_blocks": 72, "page_cache_bytes": 1 << 18}
    with tiered_rig(tmp_path, **cold) as rig:
        rig.answer(prompt, max_new_tokens=2)
        assert rig.pool.pages is not None
        taken = rig.pool.pages.statistics().takes
        for line in range(1, 25):
            interrupt = InterruptAt(line, ["h3kv.engine.page_lane"])
            with pytest.raises(KeyboardInterrupt), interrupt:
                rig.answer(prompt, max_new_tokens=2)
            assert rig.pool.pages.statistics().units.pinned == 0
            rig.engine.check_integrity()
        assert rig.pool.pages.statistics().takes > taken
