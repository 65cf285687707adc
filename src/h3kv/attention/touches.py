"""How much attention single segments draw: measured now and then, for whoever decides where segments lie.

    ask -> the next step of each sequence measures some of its layers -> take -> shares by segment

Reads of everything say nothing about a segment: only what retrieval chose counts. Without `ask` nothing is measured.

Shapes: T query rows, H query heads, K KV heads, G heads of a KV head, C clusters, B chosen clusters, S segments.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass
from typing import Final
from weakref import WeakSet

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from h3kv.core.types import SegmentId

LAYERS_MEASURED: Final = 4
"""Of each sequence, in each round: one costs as much as its choice of clusters takes to be read twice."""


@dataclass(slots=True, eq=False)
class SegmentShares:
    """What some layers of one step found for the segments of one sequence."""

    segments: tuple[SegmentId, ...]
    sums_S: NDArray[np.float64]
    rows: int
    """Rows of layers in the sums."""


class TouchSample:
    """What was measured of all sequences that share it. For the thread that runs them."""

    def __init__(self) -> None:
        self.round = 0
        """Counts how often someone asked."""
        self._measured: dict[TouchTurn, SegmentShares] = {}
        self._before: WeakSet[TouchTurn] = WeakSet()
        """Sequences that were measured when someone took it last, without those that have ended."""
        self._found: dict[SegmentId, None] = {}

    @property
    def is_whole(self) -> bool:
        """Whether every sequence that lives was measured, if it was before the last `take`: sequences take turns."""
        return all(turn in self._measured for turn in self._before)

    def ask(self) -> None:
        """Measure the next step of each sequence."""
        self.round += 1

    def find(self, segments: Iterable[SegmentId]) -> None:
        """A lookup found these, and a sequence is about to use them: the best sign that there is."""
        if self.round:
            self._found.update(dict.fromkeys(segments))

    def take(self) -> dict[SegmentId, float]:
        """What was measured since the last call: each segment's share of a sequence's attention, the largest over
        sequences; 1 for one that was found.
        """
        shares: dict[SegmentId, float] = {}
        for measured in self._measured.values():
            means_S = np.minimum(measured.sums_S / measured.rows, 1.0).tolist()
            for segment, share in zip(measured.segments, means_S, strict=True):
                shares[segment] = max(share, shares.get(segment, 0.0))
        shares.update(dict.fromkeys(self._found, 1.0))
        self._before = WeakSet(self._measured)
        self._measured, self._found = {}, {}
        return shares

    def open_turn(self) -> TouchTurn:
        """The turn of one sequence."""
        return TouchTurn(self)

    def record(self, turn: TouchTurn, shares: SegmentShares) -> None:
        """What one layer found. Layers whose segments differ are of different steps: the newest count."""
        known = self._measured.get(turn)
        if known is None or known.segments != shares.segments:
            self._measured[turn] = shares
        else:
            known.sums_S += shares.sums_S
            known.rows += shares.rows


class TouchTurn:
    """Says which layers of which steps of one sequence are measured, and keeps what they found."""

    def __init__(self, sample: TouchSample) -> None:
        self._sample = sample
        self._round = sample.round
        self._step = -1
        self._layers: frozenset[int] = frozenset()

    def measures(self, layer: int, step: int, *, layers: int, dense_layers: Container[int]) -> bool:
        """Whether a layer of a step is to be measured. Cost: two comparisons where nobody asked.

        Args:
            layer: that retrieves.
            step: of the sequence.
            layers: of the model.
            dense_layers: those that read everything.
        """
        if self._round == self._sample.round:
            return step == self._step and layer in self._layers
        self._round, self._step = self._sample.round, step
        retrieving = [each for each in range(layers) if each not in dense_layers]
        stride = max(1, -(-len(retrieving) // LAYERS_MEASURED))
        self._layers = frozenset(retrieving[self._round % stride :: stride])
        return layer in self._layers

    def add(
        self,
        chosen_TKC: NDArray[np.int32],
        lse_THC: Tensor,
        all_lse_TH: Tensor,
        segments: tuple[SegmentId, ...],
    ) -> None:
        """Count the clusters that one layer read.

        Args:
            chosen_TKC: of them, `SEGMENT_CLUSTERS * s + cluster`; -1: none.
            lse_THC: natural log-sum-exp of every cluster, CPU.
            all_lse_TH: of all tokens that the row sees, CPU.
            segments: which, by s.

        Cost: reads the choices once.
        """
        rows, kv_heads, _ = chosen_TKC.shape
        clusters = lse_THC.shape[2] // len(segments)
        chosen = torch.from_numpy(chosen_TKC).long()
        lse_TKGC = lse_THC.view(rows, kv_heads, -1, lse_THC.shape[2])
        heads = lse_TKGC.shape[2]
        of_chosen_TKGB = lse_TKGC.gather(3, chosen.clamp(min=0)[:, :, None].expand(-1, -1, heads, -1))
        shares_TKB = (of_chosen_TKGB - all_lse_TH.view(rows, kv_heads, heads, 1)).exp().mean(2)
        shares_TKB = shares_TKB.where(chosen >= 0, 0.0).nan_to_num(0.0)
        places = (chosen.clamp(min=0) // clusters).flatten().numpy()
        sums_S = np.bincount(places, weights=shares_TKB.flatten().double().numpy(), minlength=len(segments))
        self._sample.record(self, SegmentShares(segments, sums_S / kv_heads, rows))
