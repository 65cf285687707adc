"""vLLM behind the questions of `contestants.PeerContestant`. Runs in an interpreter that has vllm, without h3kv.

Usage: python vllm.py MODEL_FOLDER DTYPE CONTEXT_TOKENS; one JSON question a line on stdin, one answer a line on stdout.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time

sys.path.pop(0)  # this file's folder: its name must not hide the package
os.environ.update(
    VLLM_CPU_KVCACHE_SPACE="4",
    HF_HUB_OFFLINE="1",
    VLLM_ALLOW_LONG_MAX_MODEL_LEN="1",
    VLLM_LOGGING_LEVEL="ERROR",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
)

from vllm import LLM, SamplingParams

NAMES = {"bf16": "bfloat16", "fp32": "float32", "fp16": "float16"}


class Vllm:
    """One request at a time, stepped by hand. Prefix caching is off."""

    def __init__(self, folder: str, dtype: str, context_tokens: int) -> None:
        self._llm = LLM(
            folder,
            dtype=NAMES[dtype],
            max_model_len=context_tokens + 8,
            enforce_eager=True,
            enable_prefix_caching=False,
            max_num_batched_tokens=4096,
            hf_overrides={"max_position_embeddings": context_tokens + 8},
        )
        self._context_tokens = context_tokens
        self._ids = itertools.count()
        self._running: str | None = None
        self._seen = 0

    def start(self, prompt: list[int]) -> tuple[float, int]:
        """Seconds to the first token of a new prompt, and that."""
        engine = self._llm.llm_engine
        if self._running is not None:
            engine.abort_request([self._running])
            while engine.has_unfinished_requests():
                engine.step()
        self._running = str(next(self._ids))
        left = self._context_tokens - len(prompt)
        parameters = SamplingParams(max_tokens=left, min_tokens=left, temperature=0, ignore_eos=True)
        start = time.perf_counter()
        engine.add_request(self._running, {"prompt_token_ids": prompt}, parameters)
        self._seen = 0
        token = self._step()
        while self._seen == 0:
            token = self._step()
        return time.perf_counter() - start, token

    def steps(self, count: int) -> tuple[list[float], list[int]]:
        """Seconds and tokens of the next steps."""
        seconds, tokens = [], []
        for _ in range(count):
            start = time.perf_counter()
            tokens.append(self._step())
            seconds.append(time.perf_counter() - start)
        return seconds, tokens

    def _step(self) -> int:
        outputs = self._llm.llm_engine.step()
        if not outputs:
            return 0
        ids = outputs[0].outputs[0].token_ids
        self._seen = len(ids)
        return int(ids[-1])


def main() -> None:
    """Answer questions until stdin ends."""
    peer = Vllm(sys.argv[1], sys.argv[2], int(sys.argv[3]))
    for line in sys.stdin:
        question = json.loads(line)
        answer: dict[str, object] = {}
        if question["command"] == "start":
            answer["seconds"], answer["token"] = peer.start(question["prompt"])
        elif question["command"] == "steps":
            answer["seconds"], answer["tokens"] = peer.steps(question["count"])
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
