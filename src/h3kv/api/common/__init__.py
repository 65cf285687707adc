# Written by tools/genproto.py from proto/h3kv/api/common. Do not edit: run `make proto`.
"""Protocol common."""
