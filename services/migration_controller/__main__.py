"""`python -m services.migration_controller`: settings come from the environment, below `H3_MIGRATION_CONTROLLER_`."""

from __future__ import annotations

from h3kv.service_process import run_process
from services.migration_controller.app import serve

if __name__ == "__main__":
    run_process(serve)
