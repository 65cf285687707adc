"""vLLM that is given many prompts at once. Runs in an interpreter that has vllm, without h3kv.

Usage: python vllm_offline.py MODEL_FOLDER DTYPE CONTEXT_TOKENS; one JSON question a line on stdin, one answer a line on
stdout.
"""

from __future__ import annotations

import json
import os
import sys
import time

sys.path.pop(0)  # this file's folder: a name in it must not hide the package
os.environ.update(
    VLLM_CPU_KVCACHE_SPACE="2",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    OMP_NUM_THREADS=str(len(os.sched_getaffinity(0))),
    HF_HUB_OFFLINE="1",
    VLLM_NO_USAGE_STATS="1",
    VLLM_LOGGING_LEVEL="ERROR",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
)

from vllm import LLM, SamplingParams

NAMES = {"bf16": "bfloat16", "fp32": "float32", "fp16": "float16"}


def main() -> None:
    """Answer questions until stdin ends."""
    llm = LLM(sys.argv[1], dtype=NAMES[sys.argv[2]], max_model_len=int(sys.argv[3]), disable_log_stats=True)
    for line in sys.stdin:
        question = json.loads(line)
        answer: dict[str, object] = {}
        if question["command"] == "batch":
            prompts = [{"prompt_token_ids": prompt} for prompt in question["prompts"]]
            sampling = SamplingParams(max_tokens=question["tokens"], temperature=0, ignore_eos=True)
            start = time.perf_counter()
            llm.generate(prompts, sampling, use_tqdm=False)
            answer["seconds"] = time.perf_counter() - start
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
