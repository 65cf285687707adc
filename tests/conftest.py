"""What all tests share: Hypothesis without chance or clock, so that a run repeats exactly."""

from hypothesis import settings

settings.register_profile("repeatable", derandomize=True, deadline=None, print_blob=True)
settings.load_profile("repeatable")
