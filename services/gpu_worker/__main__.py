"""`python -m services.gpu_worker`: settings come from the environment, below `H3_GPU_WORKER_`."""

from __future__ import annotations

from h3kv.service_process import run_process
from services.gpu_worker.app import serve

if __name__ == "__main__":
    run_process(serve)
