"""What documents take of a context: exactly by their tokens, and at least by their bytes, before they are cut."""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence
from typing import Final

from h3kv.core.errors import ContextLengthError, PeerBusyError, RequestError
from h3kv.models.document_prompt import prefix_tokens
from h3kv.models.least_tokens import LeastTokens
from services.gpu_worker.documents_entry import DocumentModel

TOKENIZING_S: Final = 10.0
"""How long an upload waits for those before it to be cut into tokens: one takes seconds at the most."""


class DocumentSizes:
    """Of one model. Thread-safe."""

    def __init__(self, model: DocumentModel) -> None:
        self._model = model
        self._least = LeastTokens(model.tokenizer)
        # Others answer meanwhile: uploads take one core at most.
        self._tokenizing = threading.Lock()

    def check(self, text: str) -> int:
        """Tokens that a document takes at least; cheap, before it is cut.

        Raises:
            RequestError: the model has no chat template.
            ContextLengthError: no prompt with it fits the context.
        """
        if self._model.tokenizer.chat_template is None:
            raise RequestError("this model has no chat template, and so no documents; give the text in a prompt")
        least = self._least.of(text)
        self.check_context(least)
        return least

    def prompt(self, text: str) -> tuple[int, ...]:
        """The tokens of a new document's prefix; one is cut at a time.

        Raises:
            PeerBusyError: many others were before it.
        """
        if not self._tokenizing.acquire(timeout=TOKENIZING_S):
            message = "other documents are being cut into tokens: repeat it later"
            raise PeerBusyError(message, peer="documents")
        try:
            return tuple(prefix_tokens(self._model.tokenizer, [text]))
        finally:
            self._tokenizing.release()

    def check_context(self, tokens: int) -> None:
        """Refuse a document with so many tokens, or more, where no prompt with it fits. Raises ContextLengthError."""
        limit = self._model.context_tokens
        if tokens + 1 > limit:
            raise ContextLengthError(
                f"the document takes at least {tokens} tokens with its place in a chat, and the context holds {limit} "
                "with question and answer: split it, or raise model.max_context",
                needed_tokens=tokens + 1,
                limit_tokens=limit,
            )

    def check_together(self, tokens: Sequence[int]) -> None:
        """Refuse documents of these tokens in one chat where no prompt with all of them fits.

        Raises:
            ContextLengthError: they are too many.
        """
        needed, limit = sum(tokens) - (len(tokens) - 1) * self._frame_tokens + 1, self._model.context_tokens
        if tokens and needed > limit:
            raise ContextLengthError(
                f"document_ids: the {len(tokens)} documents take at least {needed} tokens, and the context holds "
                f"{limit} with question and answer: name fewer, or raise model.max_context",
                needed_tokens=needed,
                limit_tokens=limit,
            )

    @functools.cached_property
    def _frame_tokens(self) -> int:
        """What each document's tokens have beside its text. Those of a chat have it once, or parts of it."""
        return len(prefix_tokens(self._model.tokenizer, [""]))
