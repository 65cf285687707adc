"""Perplexity against the plain formula, and greedy answers compared."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from h3kv.bench.exact import equal_prefix
from h3kv.bench.scoring import window_loss
from h3kv.bench.tiered import label
from h3kv.testing.contiguous_cache import ContiguousCache
from h3kv.testing.engines import CONFIG, make_rig, one_thread, prompt_tokens, tiny_decoder


def test_a_window_is_scored_as_the_plain_formula_says_however_it_is_cut() -> None:
    tokens = prompt_tokens(0, 201)
    with one_thread():
        logits_TV = tiny_decoder().forward(torch.tensor(tokens[:-1]), ContiguousCache(CONFIG.layers), logits="all")
        expected = float(functional.cross_entropy(logits_TV.double(), torch.tensor(tokens[1:]), reduction="sum"))
        rig = make_rig()
        for chunk_tokens in (64, 150, 200):
            found = window_loss(tiny_decoder(), rig.pool, tokens, chunk_tokens=chunk_tokens)
            assert found == pytest.approx(expected, rel=1e-6)
    rig.check_idle()


def test_equal_tokens_are_counted_up_to_the_first_that_differs() -> None:
    assert equal_prefix([1, 2, 3], [1, 2, 3]) == 3
    assert equal_prefix([1, 2, 3], [1, 9, 3]) == 1
    assert equal_prefix([1], [2]) == 0


def test_sizes_are_named_as_people_say_them() -> None:
    assert label(32_768) == "32k"
    assert label(1000) == "1000"
