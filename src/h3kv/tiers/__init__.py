"""Stores of slabs, one class per tier, behind the port `core.ports.BlockStore`."""
