"""The native core. Arrays arrive as addresses, element types as `h3::DType` (0 fp32, 1 bf16, 2 fp16), 0 is "none".

Nothing is checked here: call it through `h3kv.attention.native` and `h3kv.models.native_kernels`. All functions but the
`isa_*` release the GIL and use the threads of one pool; results never depend on their number. The C++ headers in
`native/include/h3` say what each argument means.
"""

from collections.abc import Sequence
from typing import Final

PART_TOKENS: Final[int]
PAGE_TOKENS: Final[int]
BATCH_PAGES: Final[int]
HEAD_DIM_MAX: Final[int]
LANE_TOKENS: Final[int]
PANEL_DIMS: Final[int]
BLOCK_ROWS: Final[int]
LINEAR_ROWS_MAX: Final[int]
READ_VARIANTS: Final[int]

def isa_list() -> list[str]:
    """Instruction sets that this processor has, slowest first: portable, avx2, avx512."""

def isa_current() -> str:
    """The one in use; the best one unless another was chosen."""

def isa_select(name: str, /) -> None:
    """Use one from now on, in the whole process. Raises ValueError when the processor lacks it."""

def attend(
    q: int,
    out: int,
    lse: int,
    pages: int,
    pages_stride: int,
    q_dtype: int,
    out_dtype: int,
    page_dtype: int,
    encoding: int,
    tokens: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    page_count: int,
    position: int,
    scale: float,
    threads: int,
    page_first: int,
    page_last: int,
    state: int,
    /,
) -> None:
    """See `attend.hpp`."""

def attend_batch(call: tuple[int | float, ...], /) -> None:
    """See `attend_batch.hpp`."""

def attend_state_floats(tokens: int, heads: int, kv_heads: int, head_dim: int, page_count: int, /) -> int:
    """Size of the state of an attention in runs, in floats."""

def copy_pages(sources: int, targets: int, count: int, page_bytes: int, threads: int, /) -> None:
    """See `transform.hpp`."""

def append(
    k: int,
    v: int,
    pages: int,
    pages_stride: int,
    index: int,
    tokens: int,
    kv_heads: int,
    head_dim: int,
    dtype: int,
    encoding: int,
    threads: int,
    /,
) -> None:
    """See `transform.hpp`."""

def rotate(
    qkv: int,
    q: int,
    k: int,
    v: int,
    cos: int,
    sin: int,
    q_norm: int,
    k_norm: int,
    tokens: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    eps: float,
    dtype: int,
    threads: int,
    /,
) -> None:
    """See `transform.hpp`."""

def linear(
    x: int,
    norm: int,
    weight: int,
    bias: int,
    residual: int,
    out: int,
    tokens: int,
    in_features: int,
    out_features: int,
    eps: float,
    dtype: int,
    gated: bool,
    out_fp32: bool,
    threads: int,
    /,
) -> None:
    """See `linear.hpp`."""

def read_all(data: int, size_bytes: int, variant: int, threads: int, /) -> int:
    """See `memory.hpp`."""

MISSING: Final[int]
SEGMENT_CLUSTERS: Final[int]

def seal(
    slabs: int,
    slab_count: int,
    kv_heads: int,
    head_dim: int,
    split_keys: bool,
    page_bytes: int,
    blocks: int,
    threads: int,
    /,
) -> None:
    """See `seal.hpp`."""

class Retrieval:
    """See `retrieve.hpp`."""

    def __init__(
        self,
        q: int,
        segments: int,
        lse: int,
        totals: int,
        kv_heads: int,
        head_dim: int,
        split_keys: bool,
        page_bytes: int,
        q_dtype: int,
        page_dtype: int,
        tokens: int,
        heads: int,
        segment_count: int,
        scale: float,
        threads: int,
        scanner: object | None = None,
        /,
    ) -> None:
        """`scanner` is an `OffloadScanner`."""

    def select(
        self, exact_lse: int, chosen: int, budget: int, shortlist: int, runners: int, runner_count: int, /
    ) -> None: ...
    def attend_chosen(
        self,
        chosen: int,
        addresses: int,
        out: int,
        out_lse: int,
        read_lse: int,
        budget: int,
        estimate: bool,
        exact_out: int = 0,
        exact_lse: int = 0,
        /,
    ) -> tuple[int, int]:
        """Gives back how many clusters were read, and how many pages hold them."""

    def run(
        self,
        budget: int,
        shortlist_share: float,
        exact_out: int,
        exact_lse: int,
        out: int,
        out_lse: int,
        read_lse: int,
        /,
    ) -> tuple[int, int, int]:
        """Gives back how many clusters there are, how many were read, and how many pages hold these. Scores and choices
        are kept nowhere: `lse` and `totals` may be 0.
        """

def all_in_memory(segments: int, count: int, /) -> bool: ...
def crc32c_methods() -> list[str]:
    """Ways to compute checksums that this processor has, slowest first: portable, sse42, vpclmul."""

def crc32c(data: int, size: int, method: str = "") -> int:
    """See `crc32c.hpp`; the best method unless one is named. Raises ValueError when the processor lacks it."""

class IoEngine:
    """See `io_engine.hpp`; records as in `h3kv.tiers.io`."""

    def __init__(
        self,
        files: Sequence[int],
        depth: int,
        buffers: Sequence[tuple[int, int]],
        backend: str,
        threads: int,
        deadline_ms: int,
        faults: Sequence[tuple[str, int, int, int]],
        /,
    ) -> None:
        """Raises RuntimeError when a backend asked for by name cannot be had. `faults` need the backend `script`."""

    @property
    def backend(self) -> str: ...
    @property
    def reason(self) -> str: ...
    @property
    def buffers_reason(self) -> str: ...
    @property
    def fixed_buffers(self) -> bool: ...
    def submit(self, ops: int, count: int, /) -> bool: ...
    def ready(self) -> int: ...
    def outstanding(self) -> int: ...
    def poll(self, results: int, capacity: int, /) -> int: ...
    def wait(self, timeout_ns: int, count: int, /) -> None: ...
    def set_bell(self, bell: int, /) -> None:
        """See `h3::io::Engine::set_bell`."""

    def cancel_all(self) -> None: ...
    def close(self) -> None: ...
    def statistics(self) -> dict[str, int]: ...

def list_pages(
    chosen: int,
    tokens: int,
    kv_heads: int,
    budget: int,
    segments: int,
    ids: int,
    pages: int,
    is_cold: int,
    page_of: int,
    /,
) -> tuple[int, int]:
    """See `page_cache.hpp`: counts of pages, and of clusters in them."""

def unit_ops(
    reads: int,
    count: int,
    offsets: int,
    crcs: int,
    sizes: int,
    slab_count: int,
    check_bytes: int,
    first_tag: int,
    alignment: int,
    ops: int,
    /,
) -> tuple[int, int]:
    """See `unit_ops.hpp`."""

def find_slabs(reads: int, read_segments: int, count: int, segments: int, segment_count: int, /) -> bool:
    """See `unit_ops.hpp`."""

class PageCache:
    """See `page_cache.hpp`; records as in `h3kv.engine.page_slots`."""

    def __init__(self, addresses: int, slots: int, unit_bytes: int, run_units: int, /) -> None: ...
    @property
    def in_flight(self) -> int: ...
    @property
    def uses(self) -> int: ...
    def take(self, keys: int, count: int, slots: int, reads: int, segments: int, /) -> int: ...
    def name(self, wanted: int, count: int, layer: int, page_bytes: int, keys: int, /) -> None: ...
    def take_present(
        self, wanted: int, count: int, layer: int, page_bytes: int, found: tuple[int, int, int, int], /
    ) -> bool: ...
    def take_pages(
        self,
        wanted: int,
        count: int,
        layer: int,
        page_bytes: int,
        found: tuple[int, int, int, int],
        reads: int,
        segments: int,
        /,
    ) -> tuple[int, int, int]: ...
    def give_back_taken(self, found: tuple[int, int, int, int], /) -> None: ...
    def read_ahead(self, keys: int, count: int, room: int, reads: int, segments: int, /) -> tuple[int, int]: ...
    def end(self, tags: int, count: int, well: bool, ticket: int, /) -> int: ...
    def give_back(self, slots: int, count: int, /) -> None: ...
    def loading(self, slots: int, count: int, /) -> int: ...
    def states(self, slots: int, count: int, states: int, /) -> None: ...
    def forget(self, segment: int, /) -> None: ...
    def fault(self) -> str: ...
    def counts(self) -> dict[str, int]: ...

PROBE_BATCH_ACCESSES: Final[int]

def probe_access(address: int, size_bytes: int, batches: int, seed: int, /) -> list[float]:
    """See `access_probe.hpp`."""

MAILBOX_ENTRIES_MAX: Final[int]
MAILBOX_MEMBERS_MAX: Final[int]
MAILBOX_BYTES_MAX: Final[int]
MAILBOX_ATTEMPTS_MAX: Final[int]
MAILBOX_SPIN_NS: Final[int]

def mailbox_size_bytes(geometry: tuple[int, ...], /) -> int:
    """Of a mailbox with so many entries, bytes of a request and a reply, callers and workers; 0 where not valid."""

def mailbox_calls() -> tuple[int, int]:
    """Wakes and sleeps: system calls that mailboxes of this process made so far."""

class Mailbox:
    """See `mailbox.hpp`. A member is (id, epoch); a burial counts reposted, failed, freed, abandoned entries."""

    @staticmethod
    def create(address: int, size_bytes: int, geometry: tuple[int, ...], /) -> Mailbox:
        """Raises ValueError."""

    @staticmethod
    def attach(address: int, size_bytes: int, /) -> Mailbox:
        """Raises ValueError."""

    @property
    def geometry(self) -> tuple[int, int, int, int, int]: ...
    def register_caller(self) -> tuple[int, int] | None: ...
    def register_worker(self) -> tuple[int, int] | None: ...
    def bury_caller(self, member: tuple[int, int], /) -> tuple[int, int, int, int]: ...
    def bury_worker(self, member: tuple[int, int], /) -> tuple[int, int, int, int]: ...
    def is_caller(self, member: tuple[int, int], /) -> bool: ...
    def is_worker(self, member: tuple[int, int], /) -> bool: ...
    def depth(self) -> int: ...
    def census(self) -> list[int]: ...
    def fault(self) -> str: ...

class MailboxCaller:
    """See `mailbox.hpp`. The numbers are `h3::MailboxResult`."""

    def __init__(self, mailbox: Mailbox, member: tuple[int, int], spin_ns: int, /) -> None: ...
    def post(self, requests: Sequence[bytes], deadline_ns: int, /) -> tuple[int, list[int]]: ...
    def wait(self, ticket: int, deadline_ns: int, /) -> tuple[int, bytes | None]: ...
    def cancel(self, ticket: int, /) -> bool: ...

class MailboxWorker:
    """See `mailbox.hpp`. A taking gives result, ticket, deadline, word and bytes."""

    def __init__(self, mailbox: Mailbox, member: tuple[int, int], spin_ns: int, /) -> None:
        """For one thread at a time: RuntimeError otherwise."""

    def take(self, deadline_ns: int, /) -> tuple[int, int, int, int, bytes | None]: ...
    def reply(self, word: int, payload: bytes, /) -> int: ...

RING_HEADER_BYTES: int
RECORD_HEADER_BYTES: int

def bell_signal(bell: int, /) -> int:
    """What `bell_wait` compares with."""

def bell_ring(bell: int, /) -> None:
    """See `record_ring.hpp`."""

def bell_wait(bell: int, seen: int, timeout_ns: int, spin_ns: int, /) -> None:
    """Waits 0.1 s at most, so that an interrupt is heard."""

def ring_clear(ring: int, /) -> None:
    """Both positions at 0: before either side is made."""

def lz4_unwrap(source: int, source_size: int, target: int, target_size: int, element: int, /) -> bool:
    """`lz4_decode.hpp`, then `join_planes` of `byte_planes.hpp` for elements of two or four bytes.

    `target_size` is a multiple of `element`.
    """

def split_planes(source: int, elements: int, bytes: int, target: int, /) -> None:  # noqa: A002
    """See `byte_planes.hpp`."""

class RecordRing:
    """See `record_ring.hpp`. `capacity` is a power of two."""

    def __init__(self, memory: int, capacity: int, record_bytes_max: int, /) -> None: ...
    def room(self) -> int:
        """Bytes of the longest payload that `push` takes now."""

    def push(self, payload: bytes, /) -> bool:
        """False: there is no room. ValueError: the reader's position cannot be."""

    def pop(self) -> bytes | None:
        """None: there is none. ValueError: what was written is no record."""

OFFLOAD_JOBS_MAX: Final[int]
OFFLOAD_HELPERS_MAX: Final[int]

def job_board_bytes(jobs: int, job_bytes: int, /) -> int:
    """Of a board with room for so many jobs; 0 where the numbers are not valid."""

class JobBoard:
    """See `offload.hpp`."""

    @staticmethod
    def open(address: int, size_bytes: int, jobs: int, job_bytes: int, /) -> JobBoard:
        """Raises ValueError."""

    @staticmethod
    def attach(address: int, size_bytes: int, /) -> JobBoard:
        """Raises ValueError."""

    @property
    def jobs(self) -> int: ...
    @property
    def job_bytes(self) -> int: ...
    def next_helper(self) -> int: ...

class OffloadScanner:
    """See `offload.hpp`."""

class OffloadCaller:
    """See `offload.hpp`. `call` are the arguments of `attend`; counts are `h3::OffloadCounts`."""

    def __init__(
        self, board: JobBoard, mailbox: Mailbox, member: tuple[int, int], shared: tuple[int, int], /
    ) -> None: ...
    def attend(self, trace: bytes, call: tuple[int | float, ...], /) -> None: ...
    def attend_batch(self, trace: bytes, call: tuple[int | float, ...], /) -> None: ...
    def join(self, helper: int, /) -> None: ...
    def bury(self, helper: int, /) -> None: ...
    def bury_earlier(self) -> None: ...
    def scanner(self, trace: bytes, /) -> OffloadScanner: ...
    def counts(self) -> list[int]: ...
    def scan_counts(self) -> list[int]: ...
    def helpers(self) -> int: ...
    def quarantined(self) -> int: ...

class OffloadHelper:
    """See `offload.hpp`."""

    def __init__(
        self,
        board: JobBoard,
        mailbox: Mailbox,
        member: tuple[int, int],
        helper: int,
        ranges: Sequence[tuple[int, int]],
        spin_ns: int,
        /,
    ) -> None: ...
    def serve(self, deadline_ns: int, /) -> tuple[int, bytes | None, int, int, int, int]:
        """Result, and what was done for a job that is traced: context, begin, end, units, bytes."""

    def counts(self) -> list[int]:
        """`h3::HelperCounts` without `scans`."""

    def scans(self) -> int: ...
