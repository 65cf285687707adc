"""`python -m services.ann_offload`: settings come from the environment, below `H3_ANN_OFFLOAD_`."""

from __future__ import annotations

from h3kv.service_process import run_process
from services.ann_offload.app import serve

if __name__ == "__main__":
    run_process(serve)
