"""From settings to a node that is ready for questions, saying what was chosen on the way."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

from h3kv.cli.interrupts import Interrupts
from h3kv.cli.progress import StageProgress
from h3kv.cli.tier_report import fallbacks
from h3kv.composition import Context, load, open_node
from h3kv.config import Settings
from h3kv.core.types import DType
from h3kv.core.units import describe_size
from h3kv.engine.clock import MonotonicClock
from h3kv.node import Node
from h3kv.sizing import asks_for_tiers


@dataclass(frozen=True, slots=True)
class Session:
    """A node and the choices behind it."""

    node: Node
    source: str
    dtype: DType
    context: Context
    threads: int
    isa: str
    load_s: float

    def fields(self) -> dict[str, object]:
        """The choices under the stable keys of `--json`."""
        rope = self.context.rope
        return {
            "model": self.source,
            "dtype": self.dtype.value,
            "isa": self.isa,
            "threads": self.threads,
            "load_s": self.load_s,
            "max_context": self.node.config.max_context,
            "trained_context": self.context.trained_tokens or self.node.config.max_context,
            "rope_scaling": None if rope is None else {"type": rope.kind.value, "factor": rope.factor},
        }

    def describe(self) -> str:
        """The choices in one line."""
        reach = f"context {self.node.config.max_context:,} tokens"
        if self.context.rope is not None and self.context.trained_tokens is not None:
            scaling = f"{self.context.rope.kind.value}:{self.context.rope.factor:g}"
            reach += f" by static rope scaling {scaling} (trained for {self.context.trained_tokens:,})"
        tiers = self.node.statistics()
        caps = ", ".join(f"{tier} {describe_size(statistics.capacity_bytes)}" for tier, statistics in tiers.items())
        threads = f"{self.threads} thread{'s' * (self.threads != 1)}"
        return f"{self.source}: {self.dtype.value}, {self.isa}, {threads}; {reach}; KV caps: {caps}"


@contextlib.contextmanager
def open_session(settings: Settings, progress: StageProgress, interrupts: Interrupts) -> Iterator[Session]:
    """Load the model and open a node, closed at the end.

    Raises:
        ModelError, ConfigError, HostMemoryError, StoreError: as `load_model` and `Node.open`.
        KeyboardInterrupt: Ctrl-C between two tensors.
    """

    def on_progress(done_bytes: int, total_bytes: int) -> None:
        interrupts.check()
        progress.update(done_bytes, total_bytes)

    clock = MonotonicClock()
    began_ns = clock.now_ns()
    progress.begin(f"loading {settings.model.source}")
    progress.update(0, 1)
    loaded = load(settings, on_progress=on_progress)
    interrupts.check()
    with open_node(loaded.model, settings, clock) as node:
        load_s = (clock.now_ns() - began_ns) / 1e9
        session = Session(
            node,
            settings.model.source,
            loaded.dtype,
            loaded.context,
            threads=loaded.threads,
            isa=loaded.isa,
            load_s=load_s,
        )
        progress.say(session.describe())
        if settings.tiering.mode == "off" and asks_for_tiers(settings):
            progress.say("warning: tiering is off: the settings of host and nvme are not used")
        for reason in fallbacks(node):
            progress.say(f"warning: {reason}")
        yield session
