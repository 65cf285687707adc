"""Bounds of what clients of a node may send. Those who pass it on and those who serve it hold the same ones."""

from __future__ import annotations

from typing import Final

TENANT_NAME: Final = r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}"
"""How a tenant may be called: a regular expression for all of the name."""

SEED_MAX: Final = 2**63 - 1
"""Largest start of the random numbers."""

LOGPROBS_MAX: Final = 20
"""Alternatives that are named for one token."""

PROMPTS_MAX: Final = 64
"""Of one request."""

ANSWERS_MAX: Final = 16
"""To one prompt."""

ANSWERS_AT_A_TIME_MAX: Final = 16
"""Answers of one request that run together, so that others get their turn."""

CHAT_DOCUMENTS_MAX: Final = 64
"""Documents of one chat."""

DOCUMENT_NAME_BYTES_MAX: Final = 256
"""Of what a tenant calls a document."""

DOCUMENT_TTL_S_MAX: Final = 100 * 365 * 86_400
"""Longest time after which a document is deleted by itself."""

DOCUMENT_TEXT_BYTES_MAX: Final = 4 << 20
"""Of one document, unless settings say otherwise."""
