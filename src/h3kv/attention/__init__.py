"""Attention over pages: exact parts that merge, on the native core or in torch."""
