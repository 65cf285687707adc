# Written by tools/genproto.py from proto/h3kv/api/common/v1. Do not edit: run `make proto`.
"""Protocol common/v1."""
