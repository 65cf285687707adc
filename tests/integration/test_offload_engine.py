"""Whole answers with attention spread over helpers are those of one process, token by token."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tests.unit.attention.spread import Spread

from h3kv.core.retrieval import RetrievalSetting
from h3kv.core.types import Encoding
from h3kv.testing.engines import CONFIG, layout_of, make_rig, one_thread, prompt_tokens, tiny_decoder
from h3kv.testing.tiered_rig import WINDOW_TOKENS, tiered_rig

pytestmark = pytest.mark.slow

WIDE = replace(CONFIG, layers=1, kv_heads=4, head_dim=128)
"""With so much index in a segment of its own that each is a unit."""


@pytest.mark.parametrize("encoding", [Encoding.RAW, Encoding.INT8, Encoding.K8V4])
def test_answers_over_three_tiers_are_the_same_with_helpers(encoding: Encoding, tmp_path: Path) -> None:
    prompt = prompt_tokens(3, 3000)
    spread = Spread()
    answers = []
    with one_thread():
        for name in ("alone", "spread"):
            (tmp_path / name).mkdir()
            with tiered_rig(tmp_path / name, layout=layout_of(encoding)) as rig, spread.helped(2):
                if name == "spread":
                    rig.pool.attend_with(spread.attention)
                answers.append(rig.answer(prompt, max_new_tokens=150)[0])
                rig.engine.check_integrity()
    statistics = spread.attention.statistics()
    assert answers[0] == answers[1]
    assert statistics.shared > 0 and statistics.units_helped > 0
    spread.close()


@pytest.mark.parametrize("encoding", [Encoding.K8V4, Encoding.INT4])
def test_answers_under_retrieval_are_the_same_with_helpers(encoding: Encoding) -> None:
    prompt = prompt_tokens(4, 4500)
    spread = Spread()
    answers = []
    with one_thread(), spread.helped(2):
        for is_spread in (False, True):
            rig = make_rig(
                capacity_blocks=160,
                chunk_tokens=1024,
                model=tiny_decoder(config=WIDE),
                layout=layout_of(encoding, WIDE),
                window_tokens=WINDOW_TOKENS,
                retrieval=RetrievalSetting(budget_tokens=128),
            )
            if is_spread:
                rig.pool.attend_with(spread.attention)
            answers.append(rig.answer(prompt, max_new_tokens=150)[0])
            rig.engine.check_integrity()
    scanning = spread.attention.statistics().scanning
    assert answers[0] == answers[1]
    assert scanning.shared > 0 and scanning.units_helped > 0
    spread.close()
