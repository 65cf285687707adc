"""A model's weights, fused, and their assembly from any source one tensor at a time.

Shapes: V vocabulary, I hidden features, D head dim; `kernels.py` names those of the matrices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from h3kv.attention.native import TORCH_DTYPES
from h3kv.core.errors import ModelCorruptError
from h3kv.core.types import DType
from h3kv.machine import detect
from h3kv.models.config import ModelConfig
from h3kv.models.host_memory import check_memory, memory_errors
from h3kv.models.kernels import Linear, QkNorms

Progress = Callable[[int, int], None]
"""Called with the bytes done and the bytes in total. An exception from it ends the loading."""


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer."""

    attention_norm_I: Tensor
    qkv: Linear
    qk_norms: QkNorms | None
    output: Linear
    mlp_norm_I: Tensor
    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class Weights:
    """A whole model, all tensors in one dtype on one device."""

    embedding_VI: Tensor
    layers: tuple[LayerWeights, ...]
    final_norm_I: Tensor
    lm_head: Linear
    """Shares the embedding's storage when the config ties them."""


class WeightSource(Protocol):
    """Tensors under the names of a Hugging Face checkpoint, wherever they lie."""

    path: str

    def names(self) -> Iterable[str]:
        """All tensors. Names that no checkpoint has are the source's own."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of an existing tensor."""
        ...

    def read(self, name: str) -> Tensor:
        """An existing tensor on the CPU, of any floating type. Not to be written to."""
        ...


def load_weights(
    config: ModelConfig,
    source: WeightSource,
    *,
    dtype: DType,
    device: torch.device,
    on_progress: Progress | None = None,
    available_bytes: int | None = None,
) -> Weights:
    """Weights in `dtype` on `device`.

    Beside the result only one tensor at a time is in memory, at most in fp32.

    Args:
        config: says which tensors there must be, and of which shapes.
        source: where they lie; read once each, in order.
        dtype: of the result.
        device: of the result.
        on_progress: called after each tensor.
        available_bytes: host memory that may be taken; the default asks the system.

    Raises:
        ModelCorruptError: tensors are missing, unexpected, or of another shape than `config` says.
        HostMemoryError: too little memory. Checked before the first tensor is read.
    """
    shapes = expected_shapes(config)
    _check_shapes(shapes, source)
    sizes = [math.prod(shape) for shape in shapes.values()]
    total_bytes = sum(sizes) * dtype.size_bytes
    resident_bytes = total_bytes if device.type == "cpu" else 0
    needed_bytes = resident_bytes + max(sizes) * DType.FP32.size_bytes
    available_bytes = detect().memory_available_bytes if available_bytes is None else available_bytes
    check_memory(needed_bytes, available_bytes, f"loading {source.path} in {dtype}")
    with memory_errors(f"loading {source.path} in {dtype}", total_bytes):
        target = _Target(source, TORCH_DTYPES[dtype], device, total_bytes=total_bytes, on_progress=on_progress)
        return _assemble(config, target)


def layer_prefix(layer: int) -> str:
    """What the names of a layer's tensors begin with."""
    return f"model.layers.{layer}."


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor that a checkpoint of this config must hold, and no other may."""
    hidden, vocabulary = config.hidden_size, config.vocabulary_size
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocabulary, hidden)}
    for layer in range(config.layers):
        shapes |= {layer_prefix(layer) + name: shape for name, shape in _layer_shapes(config).items()}
    shapes["model.norm.weight"] = (hidden,)
    if not config.tied_embeddings:
        shapes["lm_head.weight"] = (vocabulary, hidden)
    return shapes


def _layer_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    hidden, gated, heads = config.hidden_size, config.intermediate_size, config.head_geometry
    matrices = {
        "self_attn.q_proj": (heads.q_features, hidden, config.qkv_bias),
        "self_attn.k_proj": (heads.kv_features, hidden, config.qkv_bias),
        "self_attn.v_proj": (heads.kv_features, hidden, config.qkv_bias),
        "self_attn.o_proj": (hidden, heads.q_features, config.output_bias),
        "mlp.gate_proj": (gated, hidden, config.mlp_bias),
        "mlp.up_proj": (gated, hidden, config.mlp_bias),
        "mlp.down_proj": (hidden, gated, config.mlp_bias),
    }
    norms = ("input_layernorm.weight", "post_attention_layernorm.weight")
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(norms, (hidden,))
    for name, (outputs, inputs, has_bias) in matrices.items():
        shapes[f"{name}.weight"] = (outputs, inputs)
        if has_bias:
            shapes[f"{name}.bias"] = (outputs,)
    if config.qk_norm:
        shapes |= {f"self_attn.{name}_norm.weight": (heads.head_dim,) for name in "qk"}
    return shapes


def _check_shapes(shapes: dict[str, tuple[int, ...]], source: WeightSource) -> None:
    found = {name for name in source.names() if not _is_derived(name)}
    if "lm_head.weight" not in shapes:
        found.discard("lm_head.weight")  # A copy of the embedding that some checkpoints keep.
    for problem, names in (("lacks", shapes.keys() - found), ("holds unexpected", found - shapes.keys())):
        if names:
            raise _contradiction(source, f"{problem} tensors ({len(names)}), such as '{min(names)}'")
    for name, shape in shapes.items():
        if source.shape(name) != shape:
            raise _contradiction(source, f"holds '{name}' of shape {source.shape(name)}, where {shape} is expected")


def _is_derived(name: str) -> bool:
    """Rotary frequencies that old checkpoints store, although the config determines them."""
    return name.endswith("rotary_emb.inv_freq")


def _contradiction(source: WeightSource, problem: str) -> ModelCorruptError:
    return ModelCorruptError(
        f"{source.path} {problem}: config and weights contradict each other; fetch both again from the same model",
        path=source.path,
    )


class _Target:
    """Allocates tensors in the wanted dtype and fills them from the source."""

    def __init__(
        self,
        source: WeightSource,
        dtype: torch.dtype,
        device: torch.device,
        *,
        total_bytes: int,
        on_progress: Progress | None,
    ) -> None:
        self._source, self._dtype, self._device = source, dtype, device
        self._total_bytes, self._done_bytes = total_bytes, 0
        self._on_progress = on_progress

    def stack(self, names: Sequence[str]) -> Tensor:
        """The named tensors one below the other, contiguous."""
        shapes = [self._source.shape(name) for name in names]
        total_shape = (sum(shape[0] for shape in shapes), *shapes[0][1:])
        stacked = torch.empty(total_shape, dtype=self._dtype, device=self._device)
        filled = 0
        for name, shape in zip(names, shapes, strict=True):
            rows = stacked[filled : filled + shape[0]].copy_(self._source.read(name))
            filled += shape[0]
            self._done_bytes += rows.numel() * rows.element_size()
            if self._on_progress is not None:
                self._on_progress(self._done_bytes, self._total_bytes)
        return stacked

    def linear(self, names: Sequence[str], has_bias: bool) -> Linear:
        """The named projections fused into one."""
        weight = self.stack([f"{name}.weight" for name in names])
        return Linear(weight, self.stack([f"{name}.bias" for name in names]) if has_bias else None)


def _assemble(config: ModelConfig, target: _Target) -> Weights:
    embedding_VI = target.stack(["model.embed_tokens.weight"])
    return Weights(
        embedding_VI=embedding_VI,
        layers=tuple(_assemble_layer(config, target, layer_prefix(layer)) for layer in range(config.layers)),
        final_norm_I=target.stack(["model.norm.weight"]),
        lm_head=Linear(embedding_VI if config.tied_embeddings else target.stack(["lm_head.weight"])),
    )


def _assemble_layer(config: ModelConfig, target: _Target, prefix: str) -> LayerWeights:
    attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
    qk_norms = None
    if config.qk_norm:
        q_D, k_D = (target.stack([f"{attention}{name}_norm.weight"]) for name in "qk")
        qk_norms = QkNorms(q_D, k_D, config.norm_eps)
    return LayerWeights(
        attention_norm_I=target.stack([f"{prefix}input_layernorm.weight"]),
        qkv=target.linear([f"{attention}{name}_proj" for name in "qkv"], config.qkv_bias),
        qk_norms=qk_norms,
        output=target.linear([f"{attention}o_proj"], config.output_bias),
        mlp_norm_I=target.stack([f"{prefix}post_attention_layernorm.weight"]),
        gate_up=target.linear([f"{mlp}gate_proj", f"{mlp}up_proj"], config.mlp_bias),
        down=target.linear([f"{mlp}down_proj"], config.mlp_bias),
    )
