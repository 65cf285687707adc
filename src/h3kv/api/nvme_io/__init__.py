# Written by tools/genproto.py from proto/h3kv/api/nvme_io. Do not edit: run `make proto`.
"""Protocol nvme_io."""
