# Written by tools/genproto.py from proto/h3kv/api/nvme_io/v1. Do not edit: run `make proto`.
"""Protocol nvme_io/v1."""
