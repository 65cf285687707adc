"""Long-context inference whose key-value cache is larger than the device's memory.

The front doors are `h3kv.node` (a node embedded in your process) and the command `h3`.
"""

import os

# torch and the native core share one OpenMP pool. Its threads spin before they sleep, so that the next parallel region
# of a decode step starts within a microsecond; the bound (some 50 us) keeps them from stealing busy cores. OpenMP reads
# this once, when it is loaded: it must be set before torch is imported. A value that the user has chosen is kept.
os.environ.setdefault("GOMP_SPINCOUNT", "20000")

__version__ = "0.1.0"

__all__ = ["__version__"]
