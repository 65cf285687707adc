"""A whole model: decode at 8K against the memory limit, prefill of 8K, and tokens equal to transformers'."""

from __future__ import annotations

import contextlib
import math
import random
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Final

from h3kv.bench.contestants import Contestant, H3Contestant, open_peers
from h3kv.bench.limit import ReadLimit
from h3kv.bench.measure import Progress, Rounds
from h3kv.bench.results import Results
from h3kv.core.errors import ConfigError
from h3kv.core.types import DType
from h3kv.models.export import export_folder
from h3kv.models.loader import LoadedModel, load_model
from h3kv.models.rope import RopeKind, RopeScaling

LONG_TOKENS: Final = 8192
EXACT_TOKENS: Final = 4096
EXACT_STEPS: Final = 256
STEPS_PER_ROUND: Final = 12
# The figures of one run lie behind each other in one sequence: room for all rounds.
CONTEXT_TOKENS: Final = LONG_TOKENS + 512


@dataclass(frozen=True, slots=True)
class Setting:
    """What the command line chose."""

    model: str
    peer_python: str | None
    _: KW_ONLY
    peers: bool
    repetitions: int
    progress: Progress


def prefill(results: Results, setting: Setting) -> None:
    """Tokens per second of an 8K prompt in bf16."""
    with _contestants(setting, DType.BF16, ("vllm", "transformers")) as (_, contestants):
        rounds = Rounds()
        for repetition in range(setting.repetitions):
            prompt = _random_tokens(LONG_TOKENS, seed=repetition)
            for contestant in contestants:
                seconds, _token = contestant.start(prompt)
                setting.progress(f"prefill 8K, {contestant.name}: {LONG_TOKENS / seconds:.0f} tokens/s")
                rounds.add(contestant.name, LONG_TOKENS / seconds)
    _put_ratios(results, "prefill.8k", "tokens_per_s", rounds)


def decode(results: Results, setting: Setting) -> None:
    """Milliseconds per token at 8K in bf16, over the time to read weights and KV once."""
    with _contestants(setting, DType.BF16, ("vllm", "transformers")) as (model, contestants):
        prompt = _random_tokens(LONG_TOKENS, seed=0)
        for contestant in contestants:
            setting.progress(f"decode 8K, {contestant.name} reads the prompt")
            contestant.start(prompt)
            contestant.steps(2)
        limit, rounds = ReadLimit(), Rounds()
        for repetition in range(setting.repetitions):
            bandwidth = limit.bytes_per_second()
            # Tokens in the cache at the middle of this round.
            length = LONG_TOKENS + 2 + round((repetition + 0.5) * STEPS_PER_ROUND)
            step_bytes = _weight_bytes(model) + length * _token_bytes(contestants)
            rounds.add("limit", step_bytes / bandwidth * 1e3)
            for contestant in contestants:
                seconds, _tokens = contestant.steps(STEPS_PER_ROUND)
                rounds.add(contestant.name, statistics.median(seconds) * 1e3)
                setting.progress(f"decode 8K, {contestant.name}: {rounds.values[contestant.name][-1]:.1f} ms a token")
    results.put("decode.8k.limit_ms", rounds.median("limit"))
    results.put("decode.8k.over_limit", rounds.ratio("h3", "limit"))
    _put_ratios(results, "decode.8k", "ms", rounds)


def exact(results: Results, setting: Setting, *, text: Path | None) -> None:
    """Greedy tokens after a prompt of 4K, fp32, until the first that differs from transformers'."""
    with _contestants(setting, DType.FP32, ("transformers",), context_tokens=EXACT_TOKENS + EXACT_STEPS) as opened:
        model, contestants = opened
        if len(contestants) < 2:
            setting.progress("exact.4k.tokens_equal needs transformers: left out")
            return
        prompt = _text_tokens(model, text)
        answers = []
        for contestant in contestants:
            setting.progress(f"exact 4K, {contestant.name}: {EXACT_STEPS} greedy tokens in fp32")
            _seconds, first = contestant.start(prompt)
            answers.append([first, *contestant.steps(EXACT_STEPS - 1)[1]])
    equal = sum(1 for _ in _equal_prefix(*answers))
    results.put("exact.4k.tokens_equal", equal)


def _equal_prefix(ours: Sequence[int], theirs: Sequence[int]) -> Iterator[int]:
    for a, b in zip(ours, theirs, strict=True):
        if a != b:
            return
        yield a


@contextlib.contextmanager
def _contestants(
    setting: Setting, dtype: DType, wanted: Sequence[str], *, context_tokens: int = CONTEXT_TOKENS
) -> Iterator[tuple[LoadedModel, list[Contestant]]]:
    setting.progress(f"loading {setting.model} in {dtype}")
    trained = load_model(setting.model, dtype=dtype)
    model = trained
    if context_tokens > trained.config.max_context:
        # Steps behind the trained context: a static scaling admits them. It changes no cost, and peers do without.
        rope = RopeScaling(RopeKind.NTK, factor=math.ceil(context_tokens / trained.config.max_context))
        model = load_model(setting.model, dtype=dtype, rope=rope, max_context=context_tokens)
    with contextlib.ExitStack() as stack:
        h3 = H3Contestant(model, context_tokens=context_tokens)
        stack.callback(h3.close)
        peers: list[Contestant] = []
        if setting.peers:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="h3-bench-"))) / "model"
            export_folder(trained, folder, dtype=dtype)
            peers = stack.enter_context(
                open_peers(
                    wanted,
                    folder,
                    peer_python=setting.peer_python,
                    dtype=dtype,
                    context_tokens=context_tokens,
                    progress=setting.progress,
                )
            )
        yield model, [h3, *peers]


def _random_tokens(count: int, *, seed: int) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(100, 40_000) for _ in range(count)]


def _text_tokens(model: LoadedModel, text: Path | None) -> list[int]:
    """The first 4K tokens of a text; a fixed random prompt without one."""
    if text is None:
        return _random_tokens(EXACT_TOKENS, seed=0)
    tokens = model.tokenizer.encode(text.read_text(encoding="utf-8"))
    if len(tokens) < EXACT_TOKENS:
        raise ConfigError(f"{text} has {len(tokens)} tokens: {EXACT_TOKENS} are needed", field="text")
    return tokens[:EXACT_TOKENS]


def _weight_bytes(model: LoadedModel) -> int:
    """Bytes of weights that one token reads: all matrices once, of the embedding one row."""
    layers = model.weights.layers
    matrices = [m.weight for layer in layers for m in (layer.qkv, layer.output, layer.gate_up, layer.down)]
    return sum(weight.nbytes for weight in (*matrices, model.weights.lm_head.weight))


def _token_bytes(contestants: Sequence[Contestant]) -> int:
    h3 = contestants[0]
    assert isinstance(h3, H3Contestant)
    return h3.layout.token_bytes


def _put_ratios(results: Results, name: str, unit: str, rounds: Rounds) -> None:
    for contestant in rounds.values:
        if contestant == "limit":
            continue
        results.put(f"{name}.{contestant}_{unit}", rounds.median(contestant))
        if contestant != "h3":
            results.put(f"{name}.vs_{contestant}", rounds.ratio("h3", contestant))
