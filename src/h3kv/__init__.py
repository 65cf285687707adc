"""Long-context inference whose key-value cache is larger than the device's memory.

The front doors are `h3kv.node` (a node embedded in your process) and the command `h3`.
"""

import os

# torch's OpenMP threads spin for a while after each product and would hold a core that the native core's threads need.
# The bound is some 50 us. OpenMP reads it once, when torch is loaded: it must be set before that. A value that the user
# has chosen is kept.
os.environ.setdefault("GOMP_SPINCOUNT", "20000")

__version__ = "0.1.0"

__all__ = ["__version__"]
