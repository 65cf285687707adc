"""The cache that transformers models fill and the attention `"h3"` reads.

    input     pad pad  A   B   C  | D  | E           attention_mask  0 0 1 1 1 | 1 | 1
    stored             A   B   C  | D  | E           padding takes no room and is never read

Shapes: B rows of the batch, T tokens of a chunk, S all tokens with padding, H query heads, K KV heads, D head dim.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any, NoReturn, Unpack

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from h3kv.core.errors import RequestError, ShapeError
from h3kv.core.types import StoreStatistics, Tier
from h3kv.h3_kv_cache import KvCache
from h3kv.hf.chunk import Chunk, ChunkStates, chunk_of
from h3kv.hf.geometry import layout_of
from h3kv.hf.layer import H3Layer
from h3kv.sequence_pool import Caps, SequencePool


class H3Cache(Cache):
    """Keys and values of a batch, kept on the tiers. Close it, or use it in a `with` block. Not thread-safe.

    Args:
        config: the model's.
        dtype: of keys and values: the model's. The configuration's where None.
        device: where the device tier lies: the device of the model.
        caps: `device_bytes`, and the tiers behind it: see `h3kv.sequence_pool.Caps`.

    Raises:
        ModelUnsupportedError: the model has other attention than plain causal attention in every layer.
        ConfigError: a cap or dtype is out of range.
        HostMemoryError: the system refuses as much memory.
        StoreError: the store's place cannot serve.
    """

    def __init__(
        self,
        config: Any,
        *,
        dtype: torch.dtype | None = None,
        device: str | torch.device = "cpu",
        **caps: Unpack[Caps],
    ) -> None:
        layout = layout_of(config, dtype)
        super().__init__(layers=[H3Layer(self) for _ in range(layout.layers)])
        self._kv = KvCache(SequencePool(layout, device=torch.device(device), caps=caps), batch=1)
        self._chunk: Chunk | None = None
        self._length = 0
        # Which of the S tokens are real; None while all are.
        self._real_BS: Tensor | None = None

    @property
    def length(self) -> int:
        """S: tokens of the past with padding, the same in all rows."""
        return self._length

    @property
    def is_begun(self) -> bool:
        """Whether it holds anything."""
        return self._length > 0

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_args: object, **_kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """What the attention `"h3"` needs, twice; never the tokens of the past. Nothing is kept before it attends.

        Raises:
            ShapeError: other heads, dtype or device than the cache was made for.
        """
        slab = self._kv.layout.slab
        expected = (key_states.shape[0], slab.kv_heads, key_states.shape[2], slab.page.head_dim)
        dtype, device = self._kv.dtype, self._kv.device
        for states in (key_states, value_states):
            if states.shape != expected or states.dtype != dtype or states.device != device:
                raise ShapeError(
                    f"keys or values {tuple(states.shape)} {states.dtype} on {states.device} for a cache of "
                    f"{expected} {dtype} on {device}: make the H3Cache with the model's own config, dtype and device"
                )
        chunk_states = ChunkStates.of(self, layer_idx, key_states, value_states)
        return chunk_states, chunk_states

    def attend(self, query_BHTD: Tensor, states: ChunkStates, real_BS: Tensor | None, *, scale: float | None) -> Tensor:
        """Keep a layer's chunk and attend to everything, [B, T, H, D] contiguous; zero in rows of padding.

        Args:
            query_BHTD: of the chunk.
            states: what `update` gave.
            real_BS: which of all tokens, the chunk's included, are real; None where all are.
            scale: of the scores.

        Raises:
            TierClosedError: after `close`.
            RequestError: a layer out of order, another batch, or a mask that does not fit the past.
            TierFullError: the chunk does not fit the caps.
        """
        batch, _, tokens, _ = query_BHTD.shape
        if states.layer == 0:
            self._begin(real_BS, batch=batch, tokens=tokens)
        chunk = self._chunk
        if chunk is None or chunk.tokens != tokens:
            raise RequestError(f"layer {states.layer} brings {tokens} tokens that layer 0 has not seen")
        self._kv.begin(states.layer, chunk.counts_B)
        out_BTHD = query_BHTD.new_zeros(query_BHTD.transpose(1, 2).shape)
        for row, indices in enumerate(chunk.indices_B):
            chosen = slice(None) if indices is None else indices
            if chunk.counts_B[row]:
                out_BTHD[row, chosen] = self._kv.attend_row(
                    query_BHTD[row].transpose(0, 1)[chosen],
                    states.k_BKTD[row].transpose(0, 1)[chosen],
                    states.v_BKTD[row].transpose(0, 1)[chosen],
                    row=row,
                    layer=states.layer,
                    scale=scale,
                )
        self._kv.end(states.layer)
        if states.layer == self._kv.layout.layers - 1:
            self._length += tokens
            self._real_BS = None if real_BS is None or bool(real_BS.all()) else real_BS
            self._chunk = None
        return out_BTHD

    def discard_step(self) -> None:
        """Forget a forward that did not reach the last layer, such as one that an error cut short."""
        self._kv.discard_step()
        self._chunk = None

    def reset(self) -> None:
        """Forget all tokens. The next forward may have another batch."""
        self._kv.reset(batch=1)
        self._chunk = None
        self._length = 0
        self._real_BS = None

    def statistics(self) -> dict[Tier, StoreStatistics]:
        """Occupancy of each tier."""
        return self._kv.statistics()

    def check_integrity(self) -> None:
        """Assert that all room belongs to rows, and that rows hold the real tokens."""
        self._kv.check_integrity()
        held = [self._length] * self._kv.batch if self._real_BS is None else self._real_BS.sum(-1).tolist()
        assert list(self._kv.tokens_B) == held

    def close(self) -> None:
        """Give everything back. Calling it again does nothing."""
        self._kv.close()

    def __enter__(self) -> H3Cache:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __deepcopy__(self, memo: object) -> NoReturn:
        raise RequestError("an H3Cache cannot be copied: make another and run the common beginning through it")

    def activate_past_recording(self) -> NoReturn:
        """Refused: what assisted decoding begins with."""
        raise RequestError(
            "an H3Cache does not take tokens back: call generate without assisted or speculative decoding"
        )

    def _begin(self, real_BS: Tensor | None, *, batch: int, tokens: int) -> None:
        """Find out which of the next tokens are real."""
        self._kv.check_open()
        if batch != self._kv.batch:
            if self.is_begun:
                raise RequestError(f"{batch} rows for an H3Cache of {self._kv.batch}: call reset(), or make another")
            self._kv.reset(batch=batch)
        past_BS, total = self._real_BS, self._length + tokens
        if real_BS is None:
            if past_BS is not None:
                raise RequestError(f"earlier tokens were padding: pass the attention_mask of all {total} tokens")
            self._chunk = chunk_of(None, batch=batch, tokens=tokens)
            return
        if real_BS.shape != (batch, total):
            raise RequestError(f"attention_mask {tuple(real_BS.shape)} for {batch} rows: must be of all {total} tokens")
        now_BS = real_BS[:, : self._length]
        if not (bool(now_BS.all()) if past_BS is None else torch.equal(now_BS, past_BS)):
            raise RequestError("attention_mask differs from the one that earlier tokens came with: pass the same again")
        self._chunk = chunk_of(real_BS[:, self._length :], batch=batch, tokens=tokens)
