"""Calls about documents: messages in, messages out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from h3kv.api.gpu_worker.v1 import gpu_worker_service_pb2 as pb
from h3kv.core.client_limits import DOCUMENT_NAME_BYTES_MAX, DOCUMENT_TTL_S_MAX
from h3kv.core.errors import RequestError
from h3kv.core.units import NS_PER_MS, NS_PER_S
from services.gpu_worker.documents import Documents
from services.gpu_worker.documents_entry import Entry
from services.gpu_worker.documents_keeper import DocumentKeeper
from services.gpu_worker.documents_prompts import OpenPrompts
from services.gpu_worker.documents_reader import DocumentReader
from services.gpu_worker.documents_record import Owner, State
from services.gpu_worker.messages import check_tenant
from services.gpu_worker.quota import TokenQuota

ERASING_NS: Final = 5 * NS_PER_S
"""How long a deletion waits for zeros on the disk at most, before it says that they are still to come."""
MARGIN_NS: Final = 200 * NS_PER_MS
"""Left of a call's time for its answer to travel."""

_STATES: Final[Mapping[State, pb.DocumentState]] = {
    State.READING: pb.DOCUMENT_STATE_READING,
    State.READY: pb.DOCUMENT_STATE_READY,
    State.FAILED: pb.DOCUMENT_STATE_FAILED,
}


@dataclass(frozen=True, slots=True)
class KeptDocuments:
    """Records, and who does with them what takes time."""

    documents: Documents
    reader: DocumentReader
    keeper: DocumentKeeper

    @property
    def prompts(self) -> OpenPrompts:
        """That are being answered."""
        return self.documents.prompts

    def start(self) -> None:
        """Begin to read and to keep. The engine's thread runs already."""
        self.keeper.start()
        self.reader.start()

    def end(self) -> None:
        """Begin to end both; waits for neither."""
        self.reader.end()
        self.keeper.end()

    def stop(self) -> None:
        """End both, and wait for them within a bound. Calling it again does nothing."""
        self.reader.stop()
        self.keeper.stop()

    def check_integrity(self) -> None:
        """Assert, once all has ended, that KV is held for documents alone."""
        self.keeper.check_integrity()


class DocumentCalls:
    """The part of `GpuWorkerService` that is about documents. Thread-safe."""

    def __init__(self, kept: KeptDocuments, quota: TokenQuota) -> None:
        self._kept = kept
        self._quota = quota

    def create(self, request: pb.CreateDocumentRequest) -> pb.CreateDocumentResponse:
        """See `CreateDocument` of the protocol."""
        if len(request.name.encode()) > DOCUMENT_NAME_BYTES_MAX:
            raise RequestError(
                f"name has {len(request.name.encode())} bytes: up to {DOCUMENT_NAME_BYTES_MAX} are allowed"
            )
        owner = owner_of(request.tenant)
        entry = self._kept.documents.create(
            owner,
            request.text,
            name=request.name,
            ttl_s=_ttl_s(request),
            is_pinned=request.is_pinned,
            check=self._kept.reader.check,
            charge=lambda new: self._charge(owner, new),
        )
        self._kept.reader.note()
        return pb.CreateDocumentResponse(document=self._message(entry))

    def get(self, request: pb.GetDocumentRequest) -> pb.GetDocumentResponse:
        """See `GetDocument` of the protocol."""
        entry = self._kept.documents.get(owner_of(request.tenant).name, request.id)
        return pb.GetDocumentResponse(document=self._message(entry))

    def list_all(self, request: pb.ListDocumentsRequest) -> pb.ListDocumentsResponse:
        """See `ListDocuments` of the protocol."""
        entries = self._kept.documents.of_tenant(owner_of(request.tenant).name)
        return pb.ListDocumentsResponse(documents=[self._message(entry) for entry in entries])

    def update(self, request: pb.UpdateDocumentRequest) -> pb.UpdateDocumentResponse:
        """See `UpdateDocument` of the protocol."""
        is_pinned = request.is_pinned if request.HasField("is_pinned") else None
        entry = self._kept.documents.update(
            owner_of(request.tenant).name, request.id, ttl_s=_ttl_s(request), is_pinned=is_pinned
        )
        return pb.UpdateDocumentResponse(document=self._message(entry))

    def delete(self, request: pb.DeleteDocumentRequest, *, time_s: float) -> pb.DeleteDocumentResponse:
        """See `DeleteDocument` of the protocol. `time_s` is left of the call."""
        left_ns = round(time_s * NS_PER_S) - MARGIN_NS
        erasure = self._kept.documents.delete(owner_of(request.tenant).name, request.id)
        is_erased = self._kept.keeper.erase(erasure, timeout_ns=min(max(left_ns, 0), ERASING_NS))
        return pb.DeleteDocumentResponse(is_erased=is_erased)

    def _charge(self, owner: Owner, entry: Entry) -> Callable[[], None]:
        """Count a document's tokens; what gives them back. Raises QuotaError."""
        admission = self._quota.admit(
            owner.name, owner.tokens_per_minute, prompt_tokens=entry.record.tokens, answer_tokens_max=1
        )
        return admission.cancel

    def _message(self, entry: Entry) -> pb.Document:
        record = entry.record
        return pb.Document(
            id=record.id,
            name=record.name,
            state=_STATES[record.state],
            failure=record.failure,
            done_tokens=entry.done_tokens,
            tokens=record.tokens,
            kv_bytes=record.tokens * self._kept.documents.model.token_bytes,
            created_s=record.created_s,
            expires_s=record.expires_s,
            is_pinned=record.is_pinned,
        )


def owner_of(tenant: pb.Tenant) -> Owner:
    """The tenant of a call. Raises RequestError for one whose name or salt is too long."""
    check_tenant(tenant)
    return Owner(
        tenant.name,
        tenant.salt,
        tenant.tokens_per_minute if tenant.HasField("tokens_per_minute") else None,
        tenant.document_bytes if tenant.HasField("document_bytes") else None,
    )


def _ttl_s(request: pb.CreateDocumentRequest | pb.UpdateDocumentRequest) -> int | None:
    if not request.HasField("ttl_s"):
        return None
    if not 1 <= request.ttl_s <= DOCUMENT_TTL_S_MAX:
        raise RequestError(f"ttl_s = {request.ttl_s}: must be 1 to {DOCUMENT_TTL_S_MAX}, or left out")
    return request.ttl_s
