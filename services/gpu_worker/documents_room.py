"""Whether there is room for one more document, or pin."""

from __future__ import annotations

from collections.abc import Sequence

from h3kv.core.errors import QuotaError, RequestError
from h3kv.core.limits import BLOCK_TOKENS
from services.gpu_worker.documents_entry import DocumentLimits
from services.gpu_worker.documents_record import DocumentRecord, Owner


def check_quota(
    owner: Owner, tokens: int, *, mine: Sequence[DocumentRecord], limits: DocumentLimits, token_bytes: int
) -> None:
    """Refuse what is more than a tenant may have.

    Args:
        owner: the tenant.
        tokens: of the new document, or fewer.
        mine: its documents.
        limits: for their number.
        token_bytes: of KV.

    Raises:
        QuotaError: it is more.
    """
    if len(mine) >= limits.documents_max:
        raise QuotaError(
            f"the tenant has {len(mine)} documents, as many as it may have: delete one, or raise documents_max",
            retry_after_s=None,
        )
    used, needed = sum(each.tokens for each in mine) * token_bytes, tokens * token_bytes
    if owner.document_bytes is not None and used + needed > owner.document_bytes:
        raise QuotaError(
            f"the document takes at least {needed} bytes of KV; the tenant has {used} bytes of documents and may have "
            f"{owner.document_bytes}: delete one, or have document_bytes raised",
            retry_after_s=None,
        )


def check_text(text: str, limits: DocumentLimits) -> None:
    """Refuse a text that is empty or too long. Raises RequestError."""
    size = len(text.encode())
    if not 1 <= size <= limits.text_bytes_max:
        rule = f"must have 1 to {limits.text_bytes_max} bytes"
        raise RequestError(f"text has {size} bytes: {rule}; split it, or raise document_text_bytes_max")


def check_pins(record: DocumentRecord, *, pinned: Sequence[DocumentRecord], limits: DocumentLimits) -> None:
    """Refuse a pin that leaves too little room for anything else.

    Args:
        record: of the document, with its tokens, or fewer.
        pinned: the others, of all tenants.
        limits: for all of them together.

    Raises:
        QuotaError: there is no room for it.
    """
    if sum(_blocks(each) for each in (*pinned, record)) > limits.pinned_blocks_max:
        own = sum(each.tokens for each in pinned if each.tenant == record.tenant)
        raise QuotaError(
            f"the document has at least {record.tokens} tokens and the tenant's pinned ones have {own}: there is no "
            "room for more pins now: unpin or delete one, or have pinned_share_max raised",
            retry_after_s=None,
        )


def _blocks(record: DocumentRecord) -> int:
    return -(-record.tokens // BLOCK_TOKENS)
