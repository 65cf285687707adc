"""A whole model: decode at 8K against the memory limit, prefill of 8K, and tokens equal to transformers'."""

from __future__ import annotations

import contextlib
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Final

from h3kv.bench.contestants import Contestant, H3Contestant, open_peers
from h3kv.bench.exact import equal_prefix
from h3kv.bench.limit import ReadLimit
from h3kv.bench.measure import Progress, Rounds, turns
from h3kv.bench.results import Results
from h3kv.bench.texts import NamedText, take_tokens
from h3kv.bench.tiered import load_reaching, random_tokens
from h3kv.core.types import DType
from h3kv.models.export import export_folder
from h3kv.models.loader import LoadedModel, load_model

LONG_TOKENS: Final = 8192
EXACT_TOKENS: Final = 4096
EXACT_STEPS: Final = 256
STEPS_PER_ROUND: Final = 12
WARM_STEPS: Final = 2


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
    peers = ("vllm", "transformers")
    with _contestants(setting, DType.BF16, peers, context_tokens=LONG_TOKENS + 64) as (model, contestants):
        rounds = Rounds()
        for repetition in range(setting.repetitions):
            prompt = random_tokens(model, LONG_TOKENS, seed=repetition)
            for contestant in turns(contestants, repetition):
                seconds, _token = contestant.start(prompt)
                setting.progress(f"prefill 8K, {contestant.name}: {LONG_TOKENS / seconds:.0f} tokens/s")
                rounds.add(contestant.name, LONG_TOKENS / seconds)
    _put_ratios(results, "prefill.8k", "tokens_per_s", rounds)


def decode(results: Results, setting: Setting) -> None:
    """Milliseconds per token at 8K in bf16, over the time to read weights and KV once."""
    # The steps of all rounds lie behind each other in one sequence.
    context_tokens = LONG_TOKENS + 64 + WARM_STEPS + setting.repetitions * STEPS_PER_ROUND
    peers = ("vllm", "transformers")
    with _contestants(setting, DType.BF16, peers, context_tokens=context_tokens) as (model, contestants):
        prompt = random_tokens(model, LONG_TOKENS, seed=0)
        for contestant in contestants:
            setting.progress(f"decode 8K, {contestant.name} reads the prompt")
            contestant.start(prompt)
            contestant.steps(WARM_STEPS)
        limit, rounds = ReadLimit(), Rounds()
        for repetition in range(setting.repetitions):
            bandwidth = limit.bytes_per_second()
            # Tokens in the cache at the middle of this round.
            length = LONG_TOKENS + WARM_STEPS + round((repetition + 0.5) * STEPS_PER_ROUND)
            step_bytes = weight_bytes(model) + length * _token_bytes(contestants)
            rounds.add("limit", step_bytes / bandwidth * 1e3)
            for contestant in turns(contestants, repetition):
                seconds, _tokens = contestant.steps(STEPS_PER_ROUND)
                rounds.add(contestant.name, statistics.median(seconds) * 1e3)
                setting.progress(f"decode 8K, {contestant.name}: {rounds.values[contestant.name][-1]:.1f} ms a token")
    results.put("decode.8k.limit_ms", rounds.median("limit"))
    results.put("decode.8k.over_limit", rounds.ratio("h3", "limit"))
    _put_ratios(results, "decode.8k", "ms", rounds)


def exact(results: Results, setting: Setting, *, named: NamedText | None) -> None:
    """Greedy tokens after a prompt of 4K, fp32, until the first that differs from transformers'.

    Raises:
        ConfigError: the text is too short.
    """
    with _contestants(setting, DType.FP32, ("transformers",), context_tokens=EXACT_TOKENS + EXACT_STEPS) as opened:
        model, contestants = opened
        if len(contestants) < 2:
            setting.progress("exact.4k.tokens_equal needs transformers: left out")
            return
        prompt = _text_tokens(model, named)
        answers = []
        for contestant in contestants:
            setting.progress(f"exact 4K, {contestant.name}: {EXACT_STEPS} greedy tokens in fp32")
            _seconds, first = contestant.start(prompt)
            answers.append([first, *contestant.steps(EXACT_STEPS - 1)[1]])
    results.put("exact.4k.tokens_equal", equal_prefix(*answers))


@contextlib.contextmanager
def _contestants(
    setting: Setting, dtype: DType, wanted: Sequence[str], *, context_tokens: int
) -> Iterator[tuple[LoadedModel, list[Contestant]]]:
    setting.progress(f"loading {setting.model} in {dtype}")
    model = load_reaching(setting.model, dtype=dtype, context_tokens=context_tokens)
    with contextlib.ExitStack() as stack:
        h3 = H3Contestant(model, context_tokens=context_tokens)
        stack.callback(h3.close)
        peers: list[Contestant] = []
        if setting.peers:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="h3-bench-"))) / "model"
            # Peers take steps behind the trained context without a scaling.
            export_folder(load_model(setting.model, dtype=dtype), folder, dtype=dtype)
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


def _text_tokens(model: LoadedModel, named: NamedText | None) -> list[int]:
    """The first 4K tokens of a text; a fixed random prompt without one."""
    return random_tokens(model, EXACT_TOKENS, seed=0) if named is None else take_tokens(model, named, EXACT_TOKENS)


def weight_bytes(model: LoadedModel) -> int:
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
