"""Measurements of this machine: medians and ratios, contestants interleaved in one run."""
