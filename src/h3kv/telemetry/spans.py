"""Every span and every attribute of spans and log lines, declared once.

    gateway.complete
      gpu_worker.generate
        gpu_worker.prefill
          ann_offload.attend
          nvme_io.move
        gpu_worker.decode_step              of some steps
          ann_offload.attend
          nvme_io.read_pages
          nvme_io.move
    migration_controller.decide
      nvme_io.relay

A span stands below its parent. Some have several: a move, for example, is for a chunk of a prompt or for a token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from h3kv.telemetry.metric import Service


@dataclass(frozen=True, slots=True)
class SpanKind:
    """One declared span."""

    name: str
    """Service and verb."""
    parents: tuple[str, ...]
    """Names of spans that it is a child of."""
    begins_trace: bool
    """Whether it is recorded without a parent too. Another one without a parent belongs to a request that nobody
    traces."""
    attributes: tuple[str, ...]
    """That it has when it ended well. It may have others."""
    sentence: str

    @property
    def service(self) -> Service:
        """Who records it."""
        return Service(self.name.partition(".")[0])


COMPLETE: Final = "gateway.complete"
GENERATE: Final = "gpu_worker.generate"
PREFILL: Final = "gpu_worker.prefill"
DECODE_STEP: Final = "gpu_worker.decode_step"
ATTEND: Final = "ann_offload.attend"
READ_PAGES: Final = "nvme_io.read_pages"
MOVE_SLABS: Final = "nvme_io.move"
RELAY: Final = "nvme_io.relay"
DECIDE: Final = "migration_controller.decide"

REQUEST_ID: Final = "h3.request.id"
TENANT: Final = "h3.tenant"
PROMPT_TOKENS: Final = "h3.prompt.token_count"
CACHED_DEVICE_TOKENS: Final = "h3.cached.device.token_count"
CACHED_HOST_TOKENS: Final = "h3.cached.host.token_count"
CACHED_NVME_TOKENS: Final = "h3.cached.nvme.token_count"
GENERATED_TOKENS: Final = "h3.generated.token_count"
TOKENS: Final = "h3.token.count"
SEQUENCES: Final = "h3.sequence.count"
STEP: Final = "h3.step.index"
TIER_SOURCE: Final = "h3.tier.source"
TIER_TARGET: Final = "h3.tier.target"
SIZE_BYTES: Final = "h3.size_bytes"
SLABS: Final = "h3.slab.count"
PAGES: Final = "h3.page.count"
UNITS: Final = "h3.unit.count"
SEGMENT: Final = "h3.segment.id"
GENERATION: Final = "h3.segment.generation"
COMMANDS: Final = "h3.command.count"
COMMAND: Final = "h3.command.number"
DIRECTION: Final = "h3.command.direction"
REASON: Final = "h3.reason"
OUTCOME: Final = "h3.outcome"
ERROR_REASON: Final = "h3.error.reason"
PEER: Final = "h3.peer.name"
ADDRESS: Final = "h3.address"
DURATION_NS: Final = "h3.duration_ns"
DOCUMENT: Final = "h3.document.id"

ATTRIBUTES: Final = {
    REQUEST_ID: "Id of the request, the same in all processes.",
    TENANT: "Name of the tenant who asks.",
    PROMPT_TOKENS: "Tokens of the prompt.",
    CACHED_DEVICE_TOKENS: "Prompt tokens whose KV was found on the device.",
    CACHED_HOST_TOKENS: "Prompt tokens whose KV was found in HOST.",
    CACHED_NVME_TOKENS: "Prompt tokens whose KV was found in the cold store alone.",
    GENERATED_TOKENS: "Tokens of the answer.",
    TOKENS: "Tokens that the step computed.",
    SEQUENCES: "Sequences that shared the step.",
    STEP: "Number of the step within its request, from 0.",
    TIER_SOURCE: "Tier that bytes were read from.",
    TIER_TARGET: "Tier that bytes were written to.",
    SIZE_BYTES: "Bytes read, or moved.",
    SLABS: "Slabs read or moved.",
    PAGES: "Pages read.",
    UNITS: "Units of attention, or of index search, computed.",
    SEGMENT: "Number of a segment in the process that owns it.",
    GENERATION: "Generation of that segment.",
    COMMANDS: "Commands sent.",
    COMMAND: "Number of a command in the controller's life.",
    DIRECTION: "Whether a command goes up or down.",
    REASON: "Why, as metrics count it.",
    OUTCOME: "How it ended, as metrics count it.",
    ERROR_REASON: "Reason of an error, from the tree of errors.",
    PEER: "Name of another process.",
    ADDRESS: "Where something serves.",
    DURATION_NS: "How long it took.",
    DOCUMENT: "Id of a document.",
}
"""What each attribute means, by name."""

_DECLARED = (
    SpanKind(
        COMPLETE,
        (),
        begins_trace=True,
        attributes=(REQUEST_ID, PROMPT_TOKENS, GENERATED_TOKENS),
        sentence="One completion over HTTP, until its last byte.",
    ),
    SpanKind(
        GENERATE,
        (COMPLETE,),
        begins_trace=True,
        attributes=(REQUEST_ID, PROMPT_TOKENS, GENERATED_TOKENS, REASON),
        sentence="One answer, from submission to its end.",
    ),
    SpanKind(
        PREFILL,
        (GENERATE,),
        begins_trace=False,
        attributes=(TOKENS,),
        sentence="One chunk of the prompt.",
    ),
    SpanKind(
        DECODE_STEP,
        (GENERATE,),
        begins_trace=False,
        attributes=(STEP, SEQUENCES),
        sentence="One step of decode, of a sample of steps.",
    ),
    SpanKind(
        ATTEND,
        (PREFILL, DECODE_STEP),
        begins_trace=False,
        attributes=(UNITS, TIER_SOURCE, SIZE_BYTES),
        sentence="Units of one layer are computed where the bytes lie.",
    ),
    SpanKind(
        READ_PAGES,
        (PREFILL, DECODE_STEP),
        begins_trace=False,
        attributes=(PAGES, TIER_SOURCE, SIZE_BYTES),
        sentence="Pages that retrieval chose are read.",
    ),
    SpanKind(
        MOVE_SLABS,
        (PREFILL, DECODE_STEP),
        begins_trace=False,
        attributes=(SLABS, TIER_SOURCE, TIER_TARGET, SIZE_BYTES),
        sentence="Slabs are read from the cold store, or written to it.",
    ),
    SpanKind(
        RELAY,
        (DECIDE,),
        begins_trace=False,
        attributes=(COMMANDS,),
        sentence="Commands are passed on to the holder of the segments.",
    ),
    SpanKind(
        DECIDE,
        (),
        begins_trace=True,
        attributes=(COMMANDS,),
        sentence="Rules that led to commands, until these are sent.",
    ),
)

SPANS: Final = {span.name: span for span in _DECLARED}
"""All spans by name."""

assert len(SPANS) == len(_DECLARED), "a span is declared twice"
