"""What a whole-model benchmark compares: engines that read a prompt and then give a token per step."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

from h3kv.attention.native import DTYPES
from h3kv.bench.measure import Progress
from h3kv.core.errors import ConfigError
from h3kv.core.layout import CacheLayout
from h3kv.core.limits import BLOCK_TOKENS, SEGMENT_TOKENS_MAX
from h3kv.core.types import DType
from h3kv.engine.config import EngineConfig
from h3kv.engine.events import Event, TokenGenerated
from h3kv.engine.request import Request, SamplingParameters
from h3kv.models.loader import LoadedModel
from h3kv.node import Node, cache_layout
from h3kv.supervisor.launch import tied
from h3kv.tiers.device import DeviceStoreConfig

CLOSE_S: Final = 30.0
"""A peer that has not ended so long after its input was closed is killed."""


class Contestant(Protocol):
    """One engine with one model. Greedy, one sequence at a time, end-of-text ignored."""

    name: str

    def start(self, prompt: Sequence[int]) -> tuple[float, int]:
        """Read a new prompt, nothing reused. Returns the seconds to its first token, and that."""
        ...

    def steps(self, count: int) -> tuple[list[float], list[int]]:
        """Seconds and tokens of the next `count` steps of the started prompt."""
        ...

    def close(self) -> None:
        """Give everything back."""
        ...


class H3Contestant:
    """A node in this process, with chunks of 2,048 tokens."""

    def __init__(self, model: LoadedModel, *, context_tokens: int) -> None:
        self.name = "h3"
        self.layout: CacheLayout = cache_layout(model.config, DTYPES[model.weights.embedding_VI.dtype])
        blocks = (context_tokens // SEGMENT_TOKENS_MAX + 3) * SEGMENT_TOKENS_MAX // BLOCK_TOKENS
        store = DeviceStoreConfig(capacity_bytes=blocks * self.layout.block_bytes)
        self.node = Node.open(model, store=store, engine=EngineConfig(chunk_tokens=2048))
        self._context_tokens = context_tokens
        self._events: Generator[Event, None, None] | None = None

    def start(self, prompt: Sequence[int]) -> tuple[float, int]:
        """See `Contestant`."""
        self._stop()
        self.node.engine.evict_cached()
        parameters = SamplingParameters(max_new_tokens=self._context_tokens - len(prompt), ignore_eos=True)
        self._events = self.node.engine.generate(Request(prompt=tuple(prompt), sampling=parameters))
        start_ns = time.perf_counter_ns()
        token = self._next_token()
        return (time.perf_counter_ns() - start_ns) / 1e9, token

    def steps(self, count: int) -> tuple[list[float], list[int]]:
        """See `Contestant`."""
        seconds, tokens = [], []
        for _ in range(count):
            start_ns = time.perf_counter_ns()
            tokens.append(self._next_token())
            seconds.append((time.perf_counter_ns() - start_ns) / 1e9)
        return seconds, tokens

    def close(self) -> None:
        """See `Contestant`."""
        self._stop()
        self.node.close()

    def _next_token(self) -> int:
        assert self._events is not None, "start first"
        for event in self._events:
            if isinstance(event, TokenGenerated):
                return event.token
        raise AssertionError("the answer ended before the benchmark did")

    def _stop(self) -> None:
        if self._events is not None:
            self._events.close()
            self._events = None


class PeerContestant:
    """Another engine in a process of its own, which sleeps while others run.

    Args:
        python: interpreter that has the peer installed.
        script: file name in `bench/peers`.
        folder: Hugging Face folder of the model.
        dtype: to compute in.
        context_tokens: longest prompt and answer together.
    """

    def __init__(self, python: str, script: str, folder: Path, *, dtype: DType, context_tokens: int) -> None:
        self.name = Path(script).stem
        path = Path(__file__).parent / "peers" / script
        self._complaints = tempfile.TemporaryFile()  # noqa: SIM115  (lives as long as the process, see close)
        self._process = subprocess.Popen(
            tied([shutil.which(python) or python, str(path), str(folder), str(dtype), str(context_tokens)]),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._complaints,
            text=True,
        )
        self._ask({"command": "ready"})

    def start(self, prompt: Sequence[int]) -> tuple[float, int]:
        """See `Contestant`."""
        answer = self._ask({"command": "start", "prompt": list(prompt)})
        return float(answer["seconds"]), int(answer["token"])

    def steps(self, count: int) -> tuple[list[float], list[int]]:
        """See `Contestant`."""
        answer = self._ask({"command": "steps", "count": count})
        return list(answer["seconds"]), list(answer["tokens"])

    def close(self) -> None:
        """See `Contestant`."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # it may have ended by itself
            self._process.stdin.close()
        try:
            self._process.wait(timeout=CLOSE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._complaints.close()

    def _ask(self, question: dict[str, object]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # the process ended: the loop below finds no line
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
        while line := self._process.stdout.readline():
            if line.startswith("{"):
                return dict(json.loads(line))
        self._complaints.seek(0)
        last = self._complaints.read().decode(errors="replace").strip().splitlines()[-1:]
        self.close()
        raise ConfigError(
            f"{self.name} ended before it answered: {' '.join(last) or 'it said nothing'}; check the interpreter that "
            "--peer-python names",
            field="peer-python",
        )


def has_module(python: str, module: str) -> bool:
    """Whether an interpreter can import a module.

    Raises:
        ConfigError: it does not start.
    """
    probe = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
    try:
        return subprocess.run([python, "-c", probe], check=False, capture_output=True).returncode == 0
    except OSError as error:
        raise ConfigError(
            f"{python} does not start: {error.strerror}; correct --peer-python", field="peer-python"
        ) from error


@contextlib.contextmanager
def open_peers(
    wanted: Sequence[str],
    folder: Path,
    *,
    peer_python: str | None,
    dtype: DType,
    context_tokens: int,
    progress: Progress,
) -> Iterator[list[Contestant]]:
    """Those of the wanted peers that are installed, closed at the end; `progress` hears which are left out.

    Args:
        wanted: modules, and scripts in `bench/peers`.
        folder: exported model.
        peer_python: interpreter to look in; transformers is looked for in this one first.
        dtype: to compute in.
        context_tokens: longest prompt and answer together.
        progress: told of every peer that is not found.
    """
    with contextlib.ExitStack() as stack:
        peers: list[Contestant] = []
        for name in wanted:
            candidates = [sys.executable] if name == "transformers" else []
            candidates += [] if peer_python is None else [peer_python]
            python = next((candidate for candidate in candidates if has_module(candidate, name)), None)
            if python is None:
                progress(f"{name} is not installed in {' or '.join(candidates) or 'any --peer-python'}: left out")
                continue
            peer = PeerContestant(python, f"{name}.py", folder, dtype=dtype, context_tokens=context_tokens)
            stack.callback(peer.close)
            peers.append(peer)
        yield peers
