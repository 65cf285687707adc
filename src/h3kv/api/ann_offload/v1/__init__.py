# Written by tools/genproto.py from proto/h3kv/api/ann_offload/v1. Do not edit: run `make proto`.
"""Protocol ann_offload/v1."""
