# Written by tools/genproto.py from proto/h3kv/api/ann_offload. Do not edit: run `make proto`.
"""Protocol ann_offload."""
