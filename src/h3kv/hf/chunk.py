"""What `H3Cache.update` gives back, and which tokens of a padded chunk are real.

Shapes: B rows of the batch, T tokens of a chunk, S all tokens, K KV heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor

from h3kv.core.errors import ConfigError


class ChunkStates(Tensor):
    """Stands for all keys and values of a layer in the way from the cache to the attention `"h3"`.

    It holds none: reading it as a tensor, as every other attention would, raises ConfigError.
    """

    k_BKTD: Tensor
    """Of the chunk alone."""
    v_BKTD: Tensor
    cache: Any
    """The `H3Cache`."""
    layer: int

    @classmethod
    def of(cls, cache: object, layer: int, k_BKTD: Tensor, v_BKTD: Tensor) -> ChunkStates:
        """The keys and values of one layer's chunk."""
        states = torch.empty(0).as_subclass(cls)
        states.cache, states.layer, states.k_BKTD, states.v_BKTD = cache, layer, k_BKTD, v_BKTD
        return states

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., object],
        types: Iterable[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> NoReturn:
        """Every use as a tensor ends here."""
        raise ConfigError(
            'an H3Cache works with the attention implementation "h3" only: load the model with '
            'attn_implementation="h3", or call model.set_attn_implementation("h3")',
            field="attn_implementation",
        )


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens that one forward adds, row by row."""

    tokens: int
    """With padding."""
    indices_B: tuple[Tensor | None, ...]
    """Indices of each row's real tokens; None where all are."""

    @property
    def counts_B(self) -> tuple[int, ...]:
        """Real tokens of each row."""
        return tuple(self.tokens if indices is None else len(indices) for indices in self.indices_B)


def chunk_of(real_BT: Tensor | None, *, batch: int, tokens: int) -> Chunk:
    """The chunk with this padding; `real_BT` is None where there is none."""
    if real_BT is None:
        return Chunk(tokens, (None,) * batch)
    return Chunk(tokens, tuple(None if bool(row.all()) else row.nonzero()[:, 0] for row in real_BT))
