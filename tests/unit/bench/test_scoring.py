"""Perplexity against the plain formula, and greedy answers compared."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn import functional

from h3kv.bench.exact import equal_prefix
from h3kv.bench.scoring import decoder_of, window_loss
from h3kv.bench.tiered import label
from h3kv.core.types import DType
from h3kv.models import load_model
from h3kv.models.decoder import Decoder
from h3kv.models.kernels import Kernels
from h3kv.models.native_kernels import NativeKernels
from h3kv.models.torch_kernels import TorchKernels
from h3kv.testing.contiguous_cache import ContiguousCache
from h3kv.testing.engines import CONFIG, make_rig, one_thread, prompt_tokens, tiny_decoder
from h3kv.testing.tiny_models import write_tiny_model


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


@pytest.mark.parametrize(("head_dim", "kernels"), [(24, TorchKernels()), (32, NativeKernels())])
def test_a_text_is_scored_on_the_operators_of_a_node(tmp_path: Path, head_dim: int, kernels: Kernels) -> None:
    write_tiny_model(tmp_path, "llama", head_dim=head_dim)
    model = load_model(tmp_path, dtype=DType.BF16)
    ids_T = torch.tensor(prompt_tokens(0, 4))
    with one_thread():
        logits_TV, expected_TV = (
            decoder.forward(ids_T, ContiguousCache(model.config.layers), logits="all")
            for decoder in (decoder_of(model), Decoder(model.config, model.weights, kernels))
        )
    assert torch.equal(logits_TV, expected_TV)


def test_equal_tokens_are_counted_up_to_the_first_that_differs() -> None:
    assert equal_prefix([1, 2, 3], [1, 2, 3]) == 3
    assert equal_prefix([1, 2, 3], [1, 9, 3]) == 1
    assert equal_prefix([1], [2]) == 0


def test_sizes_are_named_as_people_say_them() -> None:
    assert label(32_768) == "32k"
    assert label(1000) == "1000"
