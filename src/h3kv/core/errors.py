"""One tree of errors. A class says what the caller should do.

H3Error                      code                  retry   what the caller does
├─ ConfigError               INVALID_ARGUMENT      no      fix the setting it names
├─ RequestError              INVALID_ARGUMENT      no      change the request: what and how is in the message
│  ├─ ContextLengthError     INVALID_ARGUMENT      no      shorten the prompt or raise the context length
│  └─ MessageSizeError       INVALID_ARGUMENT      no      send or ask for less at a time
├─ AccessDeniedError         PERMISSION_DENIED     no      present the token, or ask who owns it
├─ ApiKeyError               UNAUTHENTICATED       no      send the key of a tenant
├─ QuotaError                RESOURCE_EXHAUSTED    later   wait as long as it says, or ask for a larger quota
├─ DocumentNotFoundError     NOT_FOUND             no      correct the id, or upload the document again
├─ PeerError                 UNKNOWN               no      read the message: another process failed
│  ├─ PeerUnavailableError   UNAVAILABLE           yes     repeat it once the process that it names runs
│  ├─ PeerTimeoutError       DEADLINE_EXCEEDED     yes     repeat it, if the call is idempotent
│  ├─ PeerBusyError          RESOURCE_EXHAUSTED    later   repeat it when the peer has less to do
│  ├─ PeerCancelledError     CANCELLED             no      we, or the peer as it ended, gave the call up
│  ├─ PeerVersionError       UNIMPLEMENTED         no      run the same version on both sides
│  └─ PeerReasonError        UNKNOWN               no      update this process: the peer knows more reasons
├─ NotRegisteredError        FAILED_PRECONDITION   yes     register again, then repeat it
├─ AddressInUseError         ABORTED               yes     end the process that serves there
├─ ModelError                FAILED_PRECONDITION   no      fix the model folder or file
│  ├─ ModelNotFoundError     NOT_FOUND             no      correct the path
│  ├─ ModelCorruptError      DATA_LOSS             no      fetch the file again
│  └─ ModelUnsupportedError  UNIMPLEMENTED         no      choose another model
├─ SlabError
│  ├─ SlabBusyError          ABORTED               yes     in flight or pinned; try next tick
│  ├─ SlabCorruptError       DATA_LOSS             no      drop it, recompute, count it
│  └─ SlabUnavailableError   UNAVAILABLE           no      drop it, recompute
├─ TierError
│  ├─ TierFullError          RESOURCE_EXHAUSTED    later   demote something first, or raise the cap it names
│  ├─ TierClosedError        FAILED_PRECONDITION   no      we closed it
│  └─ TierBrokenError        UNAVAILABLE           no      the outside broke it; sticky until reopened
├─ StoreError                FAILED_PRECONDITION   no      mend the folder, file or device that it names
│  ├─ StoreFormatError       FAILED_PRECONDITION   no      format it, or name another: it is not a store of ours
│  └─ StoreBusyError         ABORTED               yes     end the process that uses it
├─ RegionError               FAILED_PRECONDITION   no      let go of the region and ask its owner again
│  └─ RegionAddressError     FAILED_PRECONDITION   no      free the address that it names
├─ StaleHandleError          FAILED_PRECONDITION   no      the slot's generation moved on; look up again
├─ ShapeError                INVALID_ARGUMENT      no      expected and actual are printed
├─ HostMemoryError           RESOURCE_EXHAUSTED    no      free memory or choose a smaller dtype, model or cap
├─ NumericsError             DATA_LOSS             no      try another dtype, or fetch the model again
└─ InternalError             INTERNAL              no      report our mistake: its cause is attached
"""

from __future__ import annotations

from typing import ClassVar

from h3kv.core.error_codes import Code, Retry
from h3kv.core.types import SlabKey, Tier


class H3Error(Exception):
    """Root of the tree. Its message says what happened and what to do about it."""

    code: ClassVar[Code]
    reason: ClassVar[str]
    retry: ClassVar[Retry] = Retry.NO


class ConfigError(H3Error):
    """A setting has a bad value."""

    code = Code.INVALID_ARGUMENT
    reason = "CONFIG"

    def __init__(self, message: str, *, field: str) -> None:
        super().__init__(message)
        self.field = field


class RequestError(H3Error):
    """The request itself cannot be served."""

    code = Code.INVALID_ARGUMENT
    reason = "REQUEST"


class ContextLengthError(RequestError):
    """Prompt and answer do not fit the model's context."""

    reason = "CONTEXT_LENGTH"

    def __init__(self, message: str, *, needed_tokens: int, limit_tokens: int) -> None:
        super().__init__(message)
        self.needed_tokens = needed_tokens
        self.limit_tokens = limit_tokens


class MessageSizeError(RequestError):
    """A message is larger than both sides agreed on."""

    reason = "MESSAGE_SIZE"


class AccessDeniedError(H3Error):
    """The caller may not do this: it showed no token or a wrong one, or another owns what it asks for."""

    code = Code.PERMISSION_DENIED
    reason = "ACCESS_DENIED"


class ApiKeyError(H3Error):
    """A client of the node showed no key, or none that is known."""

    code = Code.UNAUTHENTICATED
    reason = "API_KEY"


class QuotaError(H3Error):
    """A tenant has used up what it may have. `retry_after_s` is None where only giving something up helps."""

    code = Code.RESOURCE_EXHAUSTED
    reason = "QUOTA"
    retry = Retry.LATER

    def __init__(self, message: str, *, retry_after_s: int | None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class DocumentNotFoundError(H3Error):
    """The tenant has no such document."""

    code = Code.NOT_FOUND
    reason = "DOCUMENT_NOT_FOUND"

    def __init__(self, message: str, *, document: str) -> None:
        super().__init__(message)
        self.document = document


class PeerError(H3Error):
    """A call to another process failed; `peer` is its address."""

    code = Code.UNKNOWN
    reason = "PEER"

    def __init__(self, message: str, *, peer: str) -> None:
        super().__init__(message)
        self.peer = peer


class PeerUnavailableError(PeerError):
    """The peer is not there, or went away during the call: whether it acted is not known."""

    code = Code.UNAVAILABLE
    reason = "PEER_UNAVAILABLE"
    retry = Retry.YES


class PeerTimeoutError(PeerError):
    """The deadline came before the answer: whether the peer acted is not known."""

    code = Code.DEADLINE_EXCEEDED
    reason = "PEER_TIMEOUT"
    retry = Retry.YES


class PeerBusyError(PeerError):
    """The peer takes no more calls now. It did nothing."""

    code = Code.RESOURCE_EXHAUSTED
    reason = "PEER_BUSY"
    retry = Retry.LATER


class PeerCancelledError(PeerError):
    """The call was given up before it ended."""

    code = Code.CANCELLED
    reason = "PEER_CANCELLED"


class PeerVersionError(PeerError):
    """The peer does not know the call."""

    code = Code.UNIMPLEMENTED
    reason = "PEER_VERSION"


class PeerReasonError(PeerError):
    """The peer gave a reason that this version has no class for."""

    reason = "PEER_REASON"

    def __init__(self, message: str, *, peer: str, remote_reason: str) -> None:
        super().__init__(message, peer=peer)
        self.remote_reason = remote_reason


class NotRegisteredError(H3Error):
    """The process that was asked does not know this client, or no longer: one of both began anew."""

    code = Code.FAILED_PRECONDITION
    reason = "NOT_REGISTERED"
    retry = Retry.YES

    def __init__(self, message: str, *, client_id: int) -> None:
        super().__init__(message)
        self.client_id = client_id


class AddressInUseError(H3Error):
    """Another process serves at this address."""

    code = Code.ABORTED
    reason = "ADDRESS_IN_USE"
    retry = Retry.YES

    def __init__(self, message: str, *, address: str) -> None:
        super().__init__(message)
        self.address = address


class ModelError(H3Error):
    """A model cannot be loaded."""

    code = Code.FAILED_PRECONDITION
    reason = "MODEL"

    def __init__(self, message: str, *, path: str) -> None:
        super().__init__(message)
        self.path = path


class ModelNotFoundError(ModelError):
    """No model lies at this path."""

    code = Code.NOT_FOUND
    reason = "MODEL_NOT_FOUND"


class ModelCorruptError(ModelError):
    """The files are there, but damaged, incomplete or contradictory."""

    code = Code.DATA_LOSS
    reason = "MODEL_CORRUPT"


class ModelUnsupportedError(ModelError):
    """The model uses a feature that this version does not implement; the message names it."""

    code = Code.UNIMPLEMENTED
    reason = "MODEL_UNSUPPORTED"


class SlabError(H3Error):
    """Something about one slab."""

    code = Code.ABORTED
    reason = "SLAB"

    def __init__(self, message: str, *, key: SlabKey) -> None:
        super().__init__(message)
        self.key = key


class SlabBusyError(SlabError):
    """The slab is in flight or already there."""

    reason = "SLAB_BUSY"
    retry = Retry.YES


class SlabCorruptError(SlabError):
    """The bytes that came back are not those that were written."""

    code = Code.DATA_LOSS
    reason = "SLAB_CORRUPT"


class SlabUnavailableError(SlabError):
    """The slab cannot be read, or not in time."""

    code = Code.UNAVAILABLE
    reason = "SLAB_UNAVAILABLE"


class TierError(H3Error):
    """Something about one tier."""

    code = Code.FAILED_PRECONDITION
    reason = "TIER"

    def __init__(self, message: str, *, tier: Tier) -> None:
        super().__init__(message)
        self.tier = tier


class TierFullError(TierError):
    """No room; `needed_bytes` and `free_bytes` say how much is missing."""

    code = Code.RESOURCE_EXHAUSTED
    reason = "TIER_FULL"
    retry = Retry.LATER

    def __init__(self, message: str, *, tier: Tier, needed_bytes: int, free_bytes: int) -> None:
        super().__init__(message, tier=tier)
        self.needed_bytes = needed_bytes
        self.free_bytes = free_bytes


class TierClosedError(TierError):
    """The store was closed by us."""

    reason = "TIER_CLOSED"


class TierBrokenError(TierError):
    """A device or file failed; the store takes no more moves until it is opened again."""

    code = Code.UNAVAILABLE
    reason = "TIER_BROKEN"


class StoreError(H3Error):
    """A place on disk cannot serve as a store."""

    code = Code.FAILED_PRECONDITION
    reason = "STORE"

    def __init__(self, message: str, *, path: str) -> None:
        super().__init__(message)
        self.path = path


class StoreFormatError(StoreError):
    """What lies there is not a store, or one of another version or damaged."""

    reason = "STORE_FORMAT"


class StoreBusyError(StoreError):
    """Another process uses the store."""

    code = Code.ABORTED
    reason = "STORE_BUSY"
    retry = Retry.YES


class RegionError(H3Error):
    """A region cannot be used: its owner began anew, or what lies in it contradicts itself."""

    code = Code.FAILED_PRECONDITION
    reason = "REGION"

    def __init__(self, message: str, *, region: str) -> None:
        super().__init__(message)
        self.region = region


class RegionAddressError(RegionError):
    """A region cannot be mapped where all processes map it."""

    reason = "REGION_ADDRESS"

    def __init__(self, message: str, *, region: str, address: int) -> None:
        super().__init__(message, region=region)
        self.address = address


class StaleHandleError(H3Error):
    """The slot behind a handle was released and perhaps given to another slab."""

    code = Code.FAILED_PRECONDITION
    reason = "STALE_HANDLE"


class ShapeError(H3Error):
    """Arrays disagree in shape, element type or device."""

    code = Code.INVALID_ARGUMENT
    reason = "SHAPE"


class HostMemoryError(H3Error):
    """The machine has too little memory for what was asked; None where a number is not known."""

    code = Code.RESOURCE_EXHAUSTED
    reason = "HOST_MEMORY"

    def __init__(self, message: str, *, needed_bytes: int | None, available_bytes: int | None) -> None:
        super().__init__(message)
        self.needed_bytes = needed_bytes
        self.available_bytes = available_bytes


class NumericsError(H3Error):
    """A result that should be a number is none."""

    code = Code.DATA_LOSS
    reason = "NUMERICS"


class InternalError(H3Error):
    """Something that should not happen; what it was is the `__cause__`."""

    code = Code.INTERNAL
    reason = "INTERNAL"
