# Written by tools/genproto.py from proto/h3kv/api/migration_controller/v1. Do not edit: run `make proto`.
"""Protocol migration_controller/v1."""
