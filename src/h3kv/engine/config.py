"""Settings of the engine."""

from __future__ import annotations

from dataclasses import dataclass

from h3kv.core.errors import ConfigError
from h3kv.core.limits import BLOCK_TOKENS
from h3kv.core.retrieval import RetrievalSetting


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How requests are run."""

    chunk_tokens: int = 1024
    """Prompt tokens of one step: a multiple of 64. Larger chunks use the cores better; a cancellation waits for the
    end of a chunk."""
    retrieval: RetrievalSetting | None = None
    """How tokens of an answer choose what they read; None: they read everything, as prompts always do."""

    def __post_init__(self) -> None:
        if self.chunk_tokens < BLOCK_TOKENS or self.chunk_tokens % BLOCK_TOKENS:
            raise ConfigError(
                f"chunk_tokens = {self.chunk_tokens}: must be a multiple of {BLOCK_TOKENS}", field="engine.chunk_tokens"
            )
