"""How the device tier is shared between the windows of running sequences and the chunk that is being computed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from h3kv.core.errors import ConfigError
from h3kv.core.limits import BLOCK_TOKENS, SINK_BLOCKS
from h3kv.core.units import describe_size, format_size

SEQUENCES_MAX: Final = 32
"""Sequences that run beside each other at most: as many rows as one pass over the weights serves."""

CHUNK_BLOCKS_MAX: Final = 128
"""Blocks of the longest chunk: 8,192 tokens, whose activations are the step's scratch memory."""


@dataclass(frozen=True, slots=True)
class DevicePlan:
    """What the device cap allows. A function of the configuration alone, so that chunks never depend on load."""

    sequences: int
    """Sequences that may run at the same time."""
    chunk_blocks: int
    """Blocks of the longest chunk that always fits beside their windows."""


def window_room(window_blocks: int) -> int:
    """Blocks that one sequence holds between steps: sinks, window, and the block that is being filled."""
    return SINK_BLOCKS + window_blocks + 1


def plan_device(capacity_blocks: int, window_blocks: int, chunk_blocks: int, *, block_bytes: int) -> DevicePlan:
    """Share the device cap.

    Args:
        capacity_blocks: of the device tier, over all layers.
        window_blocks: newest blocks of each sequence that stay.
        chunk_blocks: blocks of a chunk at the start of a prompt. Less where the cap leaves less.
        block_bytes: of a block over all layers, for the message.

    Raises:
        ConfigError: not even one sequence with a chunk of one block fits; the message has the sum.
    """
    own = window_room(window_blocks)
    if capacity_blocks < own + 1:
        raise ConfigError(
            f"the device cap holds {capacity_blocks * BLOCK_TOKENS:,} tokens of KV "
            f"({describe_size(capacity_blocks * block_bytes)}), but a running sequence needs {own + 1} blocks of "
            f"{BLOCK_TOKENS}: {SINK_BLOCKS} of sinks, {window_blocks} of window, 1 that is being filled, 1 of a chunk, "
            f"together {(own + 1) * BLOCK_TOKENS:,} tokens; raise device.kv_bytes to at least "
            f"{format_size((own + 1) * block_bytes)}, or lower device.window_tokens",
            field="device.kv_bytes",
        )
    chunk = min(chunk_blocks, capacity_blocks - own)
    sequences = min((capacity_blocks - chunk) // own, SEQUENCES_MAX)
    return DevicePlan(sequences, min(capacity_blocks - sequences * own, CHUNK_BLOCKS_MAX))
