"""The fingerprint of a loaded model."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from h3kv.core.hashing import Fingerprint
from h3kv.core.layout import LAYOUT_VERSION
from h3kv.core.types import DType, Encoding
from h3kv.models.loader import LoadedModel
from h3kv.models.tokenizer import Tokenizer
from h3kv.models.weights import Weights


def fingerprint_of(model: LoadedModel, *, dtype: DType, encoding: Encoding, kernels: str) -> Fingerprint:
    """Everything besides the tokens that decides this model's KV. Made from content, never from names or dates.

    Args:
        model: as loaded.
        dtype: of weights and pages.
        encoding: of the pages.
        kernels: which arithmetic computes it, instruction set included: sums are rounded in its order.

    Cost: hashes all weights, about 1.5 GB/s for each core.
    """
    config = model.config
    return Fingerprint(
        weights=f"{weights_digest(model.weights)} {config.family} {config.head_geometry} {config.norm_eps}",
        dtype=dtype,
        rope=f"{config.rope_theta} {config.rope}",
        tokenizer=_tokenizer_digest(model.tokenizer),
        encoding=encoding,
        fidelity=f"exact, {kernels}, page layout {LAYOUT_VERSION}",
    )


def weights_digest(weights: Weights) -> str:
    """Hash of all weights but the last norm and the projection to the vocabulary: those change answers, but no KV."""
    with ThreadPoolExecutor() as threads:
        digests = list(threads.map(_tensor_digest, _tensors(weights)))
    return hashlib.sha256(b"".join(digests)).hexdigest()


def _tensors(weights: Weights) -> Iterator[Tensor | None]:
    """In a fixed order; None in place of what a model does not have."""
    yield weights.embedding_VI
    for layer in weights.layers:
        yield layer.attention_norm_I
        yield layer.mlp_norm_I
        for linear in (layer.qkv, layer.output, layer.gate_up, layer.down):
            yield linear.weight
            yield linear.bias
        yield None if layer.qk_norms is None else layer.qk_norms.q_D
        yield None if layer.qk_norms is None else layer.qk_norms.k_D


def _tensor_digest(tensor: Tensor | None) -> bytes:
    if tensor is None:
        return bytes(hashlib.sha256().digest_size)
    state = hashlib.sha256(f"{tuple(tensor.shape)} {tensor.dtype}".encode())
    state.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().data)
    return state.digest()


def _tokenizer_digest(tokenizer: Tokenizer) -> str:
    return hashlib.sha256(tokenizer.backend.to_str().encode()).hexdigest()
