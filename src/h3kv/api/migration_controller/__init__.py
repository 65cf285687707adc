# Written by tools/genproto.py from proto/h3kv/api/migration_controller. Do not edit: run `make proto`.
"""Protocol migration_controller."""
