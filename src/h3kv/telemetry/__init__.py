"""Measurements: every name is declared in `names`, every value goes through the port `core.ports.Telemetry`."""
