"""Fakes, clocks and tiny models for tests of H3 and of what is built on it."""
