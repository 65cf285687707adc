"""A process that helps with attention, and answers each line that it reads with what it did so far, as JSON.

Run by `offload_rig.py`, and killed by tests.
"""

import dataclasses
import json
import os
import secrets
import sys
import traceback
from pathlib import Path

from h3kv.core.units import NS_PER_S
from h3kv.telemetry.tracing import NullTracer
from services.ann_offload.worker import OffloadWorker, WorkerConfig


def fail(error: BaseException) -> None:
    """Die at once: the test that reads this process's lines sees its end."""
    traceback.print_exception(error)
    os._exit(1)


def main() -> None:
    regions, crew, name, threads, spin_ns = sys.argv[1:]
    config = WorkerConfig(Path(regions), Path(crew), threads=int(threads), spin_ns=int(spin_ns), name=name)
    worker = OffloadWorker(config, boot_token=secrets.token_bytes(16), tracer=NullTracer(), on_failure=fail)
    worker.start()
    for _ in sys.stdin:
        status = {"phase": worker.phase.value, "has_torch": "torch" in sys.modules}
        sys.stdout.write(json.dumps(status | dataclasses.asdict(worker.statistics())) + "\n")
        sys.stdout.flush()
    assert worker.drain(timeout_ns=60 * NS_PER_S) == 0
    worker.stop(timeout_ns=60 * NS_PER_S)


main()
