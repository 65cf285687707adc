"""`python -m services.gateway`: settings come from the environment, below `H3_GATEWAY_`."""

from __future__ import annotations

from h3kv.service_process import run_process
from services.gateway.app import serve

if __name__ == "__main__":
    run_process(serve)
