"""`python -m services.nvme_io`: settings come from the environment, below `H3_NVME_IO_`."""

from __future__ import annotations

from h3kv.service_process import run_process
from services.nvme_io.app import serve

if __name__ == "__main__":
    run_process(serve)
