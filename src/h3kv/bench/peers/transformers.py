"""transformers behind the questions of `contestants.PeerContestant`. Runs in an interpreter that has it, without h3kv.

Usage: python transformers.py MODEL_FOLDER DTYPE CONTEXT_TOKENS; one JSON question a line on stdin, one answer a line on
stdout.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

sys.path.pop(0)  # this file's folder: its name must not hide the package
os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from transformers import AutoModelForCausalLM

NAMES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp16": torch.float16}


class Transformers:
    """A model and its cache, stepped by hand, with the attention that transformers chooses itself (sdpa)."""

    def __init__(self, folder: str, dtype: str) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=NAMES[dtype])
        self._cache: Any = None
        self._token = torch.zeros(1, 1, dtype=torch.long)

    @torch.inference_mode()
    def start(self, prompt: list[int]) -> tuple[float, int]:
        """Seconds to the first token of a new prompt, and that."""
        self._cache = None
        start = time.perf_counter()
        self._forward(torch.tensor([prompt]))
        return time.perf_counter() - start, int(self._token)

    @torch.inference_mode()
    def steps(self, count: int) -> tuple[list[float], list[int]]:
        """Seconds and tokens of the next steps."""
        seconds, tokens = [], []
        for _ in range(count):
            start = time.perf_counter()
            self._forward(self._token)
            tokens.append(int(self._token))
            seconds.append(time.perf_counter() - start)
        return seconds, tokens

    def _forward(self, ids: torch.Tensor) -> None:
        output = self._model(ids, past_key_values=self._cache, use_cache=True, logits_to_keep=1)
        self._cache = output.past_key_values
        self._token = output.logits[:, -1:].argmax(-1)


def main() -> None:
    """Answer questions until stdin ends."""
    peer = Transformers(sys.argv[1], sys.argv[2])
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
