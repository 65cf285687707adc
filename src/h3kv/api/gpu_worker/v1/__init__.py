# Written by tools/genproto.py from proto/h3kv/api/gpu_worker/v1. Do not edit: run `make proto`.
"""Protocol gpu_worker/v1."""
