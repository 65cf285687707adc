# Written by tools/genproto.py from proto/h3kv/api/gpu_worker. Do not edit: run `make proto`.
"""Protocol gpu_worker."""
