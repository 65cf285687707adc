"""How much attention segments draw is measured when someone asks, and changes no number."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.unit.attention.test_retrieval import queries, sealed_context

from h3kv.attention.page_table import IndexedSegments
from h3kv.attention.parts import Part
from h3kv.attention.retrieval import RetrievalMeter
from h3kv.attention.retriever import Query, Retrieved, retrieve
from h3kv.attention.touches import SegmentShares, TouchSample, TouchTurn
from h3kv.core.retrieval import RetrievalSetting
from h3kv.core.types import SegmentId


def attend(touches: TouchTurn | None, *, budget_tokens: int) -> Retrieved:
    context = sealed_context()
    q_THD, exact_lse_TH = queries(context, tokens=1, group=3)
    rows_S = context.rows_S
    indexed = IndexedSegments(
        rows_S[None], tuple(SegmentId(10 + place) for place in range(len(rows_S))), np.zeros(0, dtype=np.intp), ((),)
    )
    return retrieve(
        Query(q_THD, 1 << 20, None),
        indexed,
        Part(torch.zeros(q_THD.shape), exact_lse_TH),
        layer=0,
        layout=context.layout,
        setting=RetrievalSetting(budget_tokens=budget_tokens),
        source=None,
        meter=RetrievalMeter(),
        touches=touches,
    )


@pytest.mark.parametrize("budget_tokens", [128, 1 << 20])
def test_shares_are_those_of_what_was_read_and_the_result_is_the_same(budget_tokens: int) -> None:
    sample = TouchSample()
    plain = attend(None, budget_tokens=budget_tokens)
    measured = attend(sample.open_turn(), budget_tokens=budget_tokens)
    torch.testing.assert_close(measured.part.out_THD, plain.part.out_THD, atol=0, rtol=0)
    torch.testing.assert_close(measured.part.lse_TH, plain.part.lse_TH, atol=0, rtol=0)
    shares = sample.take()
    # What is read exactly beside the segments has the rest. Shares are the scan's, which sees half of a key's bits.
    _, exact_lse_TH = queries(sealed_context(), tokens=1, group=3)
    beside = float((exact_lse_TH - plain.part.lse_TH).exp().mean())
    read = float((plain.read_lse_QH - plain.part.lse_TH).exp().mean())
    assert sum(shares.values()) == pytest.approx(read - beside, abs=0.04)
    assert all(0 <= share <= 1 for share in shares.values())
    assert sample.take() == {}


def test_nothing_is_measured_unless_someone_asks_and_then_one_step_of_each_sequence() -> None:
    sample = TouchSample()
    turns = [sample.open_turn(), sample.open_turn()]

    def measured(turn: TouchTurn, step: int) -> list[int]:
        return [layer for layer in range(3, 30) if turn.measures(layer, step, layers=30, dense_layers=(0, 1, 2))]

    assert [measured(turn, 7) for turn in turns] == [[], []]
    sample.find([SegmentId(1)])
    assert sample.take() == {}
    sample.ask()
    first = measured(turns[0], 8)
    assert 3 <= len(first) <= 4
    assert measured(turns[0], 9) == []
    assert measured(turns[1], 3) == first
    sample.ask()
    assert set(first).isdisjoint(measured(turns[0], 10)), "other layers have their turn"
    sample.find([SegmentId(1)])
    assert sample.take() == {SegmentId(1): 1.0}


def test_a_model_of_one_retrieving_layer_is_measured_in_it() -> None:
    sample = TouchSample()
    turn = sample.open_turn()
    for step in range(5):
        sample.ask()
        assert turn.measures(2, step, layers=3, dense_layers=(0, 1))


def test_the_largest_share_over_sequences_counts() -> None:
    sample = TouchSample()
    for lse in (-1.0, -3.0):
        chosen_TKC = np.array([[[0, 65]]], dtype=np.int32)
        lse_THC = torch.full((1, 1, 128), -torch.inf)
        lse_THC[0, 0, 0], lse_THC[0, 0, 65] = lse, -2.0
        sample.open_turn().add(chosen_TKC, lse_THC, torch.zeros(1, 1), (SegmentId(1), SegmentId(2)))
    assert sample.take() == pytest.approx({SegmentId(1): np.exp(-1.0), SegmentId(2): np.exp(-2.0)})


def test_a_sample_is_whole_when_every_sequence_took_its_turn_again() -> None:
    sample = TouchSample()
    assert sample.is_whole
    turns = [sample.open_turn(), sample.open_turn()]
    shares = SegmentShares((SegmentId(1),), np.ones(1), 1)
    for turn in turns:
        sample.record(turn, shares)
    sample.take()
    sample.record(turns[1], shares)
    assert not sample.is_whole
    sample.record(turns[0], shares)
    assert sample.is_whole
    sample.take()
    # One of them has ended: it is waited for once.
    sample.record(turns[0], shares)
    assert not sample.is_whole
    sample.take()
    sample.record(turns[0], shares)
    assert sample.is_whole
