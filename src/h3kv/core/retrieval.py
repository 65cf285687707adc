"""How a decode step chooses what it reads exactly."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RetrievalSetting:
    """Part of the fidelity class of what is decoded under it."""

    budget_tokens: int
    """Tokens that each KV head reads exactly beside the window, in whole clusters, the best ones first."""
    dense_layers: tuple[int, ...] = ()
    """Layers that read everything."""
    shortlist_share: float = 1.0
    """Share of the clusters whose keys are scanned, the best ones by their mean keys; 1: all, whatever their means."""
    best_effort: bool = False
    """Whether clusters that do not come in time are estimated. Results then depend on time."""
    recall_every: int = 0
    """Decode steps from one measurement of recall to the next, on one layer in turn; 0: never."""

    def __post_init__(self) -> None:
        assert self.budget_tokens >= 0
        assert 0 < self.shortlist_share <= 1
