"""One layer of an `H3Cache`, as transformers asks for it."""

from __future__ import annotations

from typing import NoReturn, Protocol

from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from h3kv.core.errors import RequestError


class Owner(Protocol):
    """What a layer needs of its cache."""

    @property
    def length(self) -> int:
        """Tokens of the past with padding."""
        ...

    @property
    def is_begun(self) -> bool:
        """Whether it holds anything."""
        ...


class H3Layer(CacheLayerMixin):  # type: ignore[no-untyped-call]  # transformers annotates only some methods
    """Answers questions about sizes; what would change stored tokens is refused by name. It holds nothing itself."""

    is_compileable = False
    is_croppable = False
    is_sliding = False
    supports_early_init = False

    def __init__(self, owner: Owner) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # the same
        self._owner = owner

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the keys that a mask is for."""
        return self._owner.length + query_length, 0

    def get_seq_length(self) -> int:
        """Tokens of the past with padding."""
        return self._owner.length

    def get_max_length(self) -> int:
        """-1, as transformers says that there is no fixed bound."""
        return -1

    def lazy_initialization(self, *_states: Tensor) -> None:
        """Nothing to do: the cache has its geometry from the configuration."""

    def update(self, *_states: object, **_arguments: object) -> NoReturn:
        """Refused: only the cache knows its layers' order."""
        raise RequestError("call update of the H3Cache, not of one of its layers")

    def crop(self, tokens_to_remove: int) -> None:
        """Refused, unless there is nothing to remove."""
        if tokens_to_remove != 0:
            _refuse("take tokens back", "call reset() and run the tokens that stay again")

    def reorder_cache(self, beam_idx: Tensor) -> NoReturn:
        """Refused: what beam search does with its cache."""
        _refuse(f"reorder its {len(beam_idx)} rows", "call generate with num_beams=1")

    def batch_repeat_interleave(self, repeats: int) -> NoReturn:
        """Refused."""
        _refuse(f"repeat its rows {repeats} times", "give the whole batch from the start")

    def batch_select_indices(self, indices: Tensor) -> NoReturn:
        """Refused."""
        _refuse(f"keep {len(indices)} of its rows", "give the whole batch until the end")

    def offload(self) -> NoReturn:
        """Refused."""
        _refuse("offload layers", "set its caps: it moves tokens by itself")

    def prefetch(self) -> NoReturn:
        """Refused."""
        self.offload()

    def reset(self) -> NoReturn:
        """Refused: only all layers together can forget."""
        _refuse("forget one layer", "call reset() of the cache")


def _refuse(what: str, cure: str) -> NoReturn:
    raise RequestError(f"an H3Cache does not {what}: {cure}")
