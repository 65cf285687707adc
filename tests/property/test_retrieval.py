"""What holds for any context, any rows and any setting of retrieval."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.attention.slabs import encode_slab, rows_of, slab_layout

from h3kv.attention.retrieval import SEGMENT_CLUSTERS, Retrieval
from h3kv.attention.sealing import seal
from h3kv.core.limits import BLOCK_CLUSTERS, BLOCK_TOKENS, CLUSTER_TOKENS
from h3kv.core.retrieval import RetrievalSetting
from h3kv.core.types import Encoding


@settings(max_examples=40)
@given(
    seed=st.integers(0, 1 << 16),
    encoding=st.sampled_from([Encoding.K8V4, Encoding.INT4]),
    blocks=st.lists(st.integers(1, 4), max_size=3),
    group=st.integers(1, 6),
    tokens=st.integers(1, 3),
    budget=st.integers(0, 60),
    share=st.floats(0.05, 1.0),
    sharpness=st.sampled_from([0.0, 0.3, 3.0, 30.0]),
)
def test_a_choice_is_whole_and_a_part_is_complete(
    *,
    seed: int,
    encoding: Encoding,
    blocks: list[int],
    group: int,
    tokens: int,
    budget: int,
    share: float,
    sharpness: float,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    layout = slab_layout(encoding, kv_heads=2, head_dim=32)
    slabs = []
    for count in blocks:
        k_KND, v_KND = torch.randn(2, 2, count * BLOCK_TOKENS, 32, generator=generator)
        slabs.append(encode_slab(k_KND, v_KND, layout))
        seal(np.array([slabs[-1].address], dtype=np.uint64), layout=layout, blocks=count)
    q_THD = sharpness * torch.randn(tokens, 2 * group, 32, generator=generator)
    setting = RetrievalSetting(budget * CLUSTER_TOKENS, shortlist_share=share)
    retrieval = Retrieval(q_THD, rows_of(slabs), layout=layout)
    chosen_TKC = retrieval.select(torch.randn(tokens, 2 * group, generator=generator), setting=setting)

    used = [SEGMENT_CLUSTERS * s + c for s, count in enumerate(blocks) for c in range(BLOCK_CLUSTERS * count)]
    assert chosen_TKC.shape == (tokens, 2, min(budget, len(used)))
    assert np.isin(chosen_TKC, used).all()
    assert (np.diff(chosen_TKC, axis=2) > 0).all()

    # What was read and what was estimated make up the whole.
    whole, chosen_lse_TH = retrieval.attend_apart()
    read = retrieval.attend(estimate=False)
    assert torch.equal(read.lse_TH, chosen_lse_TH)
    assert torch.isfinite(whole.out_THD).all()
    unread_THC = retrieval.lse_THC.clone()
    for t, k in np.ndindex(tokens, 2):
        unread_THC[t, group * k : group * (k + 1), torch.from_numpy(chosen_TKC[t, k]).long()] = -torch.inf
    expected_TH = torch.logaddexp(read.lse_TH, torch.logsumexp(unread_THC, dim=2))
    torch.testing.assert_close(whole.lse_TH, expected_TH, atol=1e-4, rtol=1e-5)
