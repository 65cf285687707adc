"""What is compared: an encoding, read exactly or by retrieval."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from h3kv.core.retrieval import RetrievalSetting
from h3kv.core.types import Encoding

RECALL_EVERY: Final = 1
"""Chunks between two measurements of recall while quality is measured: each in the next layer that retrieves."""


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to keep and to read KV."""

    name: str
    """As in metrics: letters, digits, underscores."""
    encoding: Encoding
    retrieval: RetrievalSetting | None = None
    """None: every token is read exactly."""

    @property
    def mode(self) -> str:
        """In words."""
        return "exact" if self.retrieval is None else "retrieval"

    @property
    def details(self) -> str:
        """Budget, dense layers and shortlist, as a table shows them; empty for exact."""
        setting = self.retrieval
        if setting is None:
            return ""
        dense = f", dense {','.join(map(str, setting.dense_layers))}" if setting.dense_layers else ""
        shortlist = f", shortlist {setting.shortlist_share:g}" if setting.shortlist_share < 1 else ""
        return f"budget {setting.budget_tokens}{dense}{shortlist}"


REFERENCE: Final = Variant("raw", Encoding.RAW)
"""Full attention over the numbers that the model computed."""


def exact(encoding: Encoding) -> Variant:
    """A variant that reads every token in this encoding."""
    return Variant(encoding.value, encoding)


def retrieval(
    encoding: Encoding,
    budget_tokens: int,
    *,
    dense_layers: tuple[int, ...] = (),
    shortlist_share: float = 1.0,
    name: str | None = None,
) -> Variant:
    """A variant that decodes by retrieval; named by its setting where no name is given."""
    setting = RetrievalSetting(
        budget_tokens, dense_layers=dense_layers, shortlist_share=shortlist_share, recall_every=RECALL_EVERY
    )
    if name is None:
        dense = f"_dense{len(dense_layers)}" if dense_layers else ""
        shortlist = f"_shortlist{round(100 * shortlist_share)}" if shortlist_share < 1 else ""
        name = f"{encoding.value}_budget{budget_tokens}{dense}{shortlist}"
    return Variant(name, encoding, setting)
