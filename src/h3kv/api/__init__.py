# Written by tools/genproto.py from proto/h3kv/api. Do not edit: run `make proto`.
"""Messages and services of all processes."""
