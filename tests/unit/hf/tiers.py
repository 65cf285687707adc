"""Caps so small that every tier works, for the tiny models of these tests: fp32, 2 layers, 2 KV heads of 16.

A block takes 32 KiB over both layers. Staging takes 4 slots of 16 blocks of one layer: a MiB.
"""

from __future__ import annotations

from pathlib import Path

from h3kv.sequence_pool import Caps


def small_caps(store: Path, *, rows: int = 1) -> Caps:
    """Device: 16 blocks a row, 64 tokens of window. HOST: one open segment of 1,024 tokens a row beside staging."""
    return {
        "device_bytes": rows << 19,
        "host_bytes": (1 << 20) + (rows << 19),
        "store": store,
        "store_bytes": "32MiB",
        "window_tokens": 64,
    }
