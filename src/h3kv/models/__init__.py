"""Models: config, weights and tokenizer from any source, and a lean decoder that runs them."""

from h3kv.models.config import ModelConfig
from h3kv.models.decoder import Decoder, KvCache
from h3kv.models.loader import LoadedModel, load_model
from h3kv.models.rope import RopeKind, RopeScaling
from h3kv.models.tokenizer import Tokenizer
from h3kv.models.torch_kernels import TorchKernels

__all__ = [
    "Decoder",
    "KvCache",
    "LoadedModel",
    "ModelConfig",
    "RopeKind",
    "RopeScaling",
    "Tokenizer",
    "TorchKernels",
    "load_model",
]
