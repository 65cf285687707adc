"""The clusters that nearly were chosen, and the pages of choices that lie on NVMe."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
from tests.unit.attention.test_retrieval import queries, sealed_context

from h3kv.attention.page_table import IndexedSegments
from h3kv.attention.retrieval import INDEXED_DTYPE, SEGMENT_CLUSTERS, Retrieval
from h3kv.attention.retriever import _wanted
from h3kv.core.limits import BLOCK_CLUSTERS, CLUSTER_TOKENS
from h3kv.core.retrieval import RetrievalSetting
from h3kv.core.types import SegmentId

SETTING = RetrievalSetting(budget_tokens=24 * CLUSTER_TOKENS)


@pytest.mark.parametrize("share", [1.0, 0.4])
def test_runners_are_what_a_larger_budget_chooses_besides(share: float) -> None:
    context = sealed_context()
    q_THD, exact_lse_TH = queries(context, tokens=2, group=3)
    retrieval = Retrieval(q_THD, context.rows_S, layout=context.layout)
    setting = dataclasses.replace(SETTING, shortlist_share=share)
    alone_TKC = retrieval.select(exact_lse_TH, setting=setting)
    chosen_TKC = retrieval.select(exact_lse_TH, setting=setting, runners=10)
    runners_TKC = retrieval.runners_TKC
    larger = dataclasses.replace(setting, budget_tokens=34 * CLUSTER_TOKENS)
    larger_TKC = retrieval.select(exact_lse_TH, setting=larger)
    np.testing.assert_array_equal(chosen_TKC, alone_TKC)
    np.testing.assert_array_equal(np.sort(np.concatenate([chosen_TKC, runners_TKC], axis=2)), larger_TKC)
    assert (np.diff(runners_TKC, axis=2) > 0).all()


def test_there_are_no_more_runners_than_clusters() -> None:
    context = sealed_context(blocks=(3,))
    q_THD, exact_lse_TH = queries(context, tokens=1, group=1)
    retrieval = Retrieval(q_THD, context.rows_S, layout=context.layout)
    nearly = RetrievalSetting(budget_tokens=(3 * BLOCK_CLUSTERS - 2) * CLUSTER_TOKENS)
    chosen_TKC = retrieval.select(exact_lse_TH, setting=nearly, runners=5)
    for chosen, runners in zip(chosen_TKC[0].tolist(), retrieval.runners_TKC[0].tolist(), strict=True):
        assert sorted(chosen + runners[:2]) == list(range(3 * BLOCK_CLUSTERS))
        assert runners[2:] == [-1, -1, -1]
    retrieval.select(exact_lse_TH, setting=RetrievalSetting(0), runners=5)
    assert retrieval.runners_TKC.size == 0


@pytest.mark.parametrize("rows", [1, 3])
def test_pages_on_nvme_are_named_once(rows: int) -> None:
    generator = np.random.default_rng(rows)
    rows_S = np.zeros(5, dtype=INDEXED_DTYPE)
    rows_S["pages"] = [0, 4096, 0, 0, 4096]
    indexed = IndexedSegments(rows_S[None], tuple(map(SegmentId, (9, 4, 7, 2, 5))), np.zeros(0, dtype=np.intp), ())
    chosen_QKC = np.array(
        [[generator.choice(5 * SEGMENT_CLUSTERS, 60, replace=False) for _ in range(2)] for _ in range(rows)]
    )
    chosen_QKC = np.sort(chosen_QKC.astype(np.int32), axis=2)
    chosen_QKC[:, :, 58:] = -1
    wanted_N, (is_cold_QKC, page_of) = _wanted(chosen_QKC, rows_S, indexed)
    expected, named = set(), []
    for row, head, at in itertools.product(range(rows), range(2), range(60)):
        segment, cluster = divmod(int(chosen_QKC[row, head, at]), SEGMENT_CLUSTERS)
        is_cold = chosen_QKC[row, head, at] >= 0 and segment in {0, 2, 3}
        assert is_cold == is_cold_QKC[row, head, at]
        if is_cold:
            page = (int(indexed.segments[segment]), head, cluster // BLOCK_CLUSTERS, 0)
            expected.add(page)
            named.append(page)
    assert sorted(wanted_N.tolist()) == sorted(expected)
    assert [wanted_N.tolist()[page] for page in page_of] == named
