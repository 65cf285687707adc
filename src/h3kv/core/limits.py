"""Sizes that the whole system agrees on, each with its reason.

A number lives here when two modules must use the same value. The asserts at the end prove the
relations between them at import.
"""

import itertools
from typing import Final

BLOCK_TOKENS: Final = 64
"""Tokens in a block. The unit of hashing and of prefix matching: a prompt is reused in whole blocks."""

SEGMENT_BLOCKS_MAX: Final = 16
"""Blocks in a full segment: 1,024 tokens, so one layer of Llama-3.1-8B in bf16 is a 4 MiB slab."""

SEGMENT_TOKENS_MAX: Final = BLOCK_TOKENS * SEGMENT_BLOCKS_MAX

EXTENT_CLASSES_BLOCKS: Final = (1, 2, 4, 8, 16)
"""Sizes in which room for a segment is handed out, in blocks. Powers of two: a buddy allocator's orders."""

SINK_BLOCKS: Final = 1
"""Blocks of the first segment. The tokens that attention falls back on stay apart, for tiers that never move them."""

LANE_TOKENS: Final = 16
"""Tokens that one 64-byte vector of fp32 scores holds; head dimensions are multiples of it."""

CLUSTER_TOKENS: Final = 16
"""Tokens of a cluster: one vector of scores. Every cluster is full, since segments hold whole blocks."""

BLOCK_CLUSTERS: Final = BLOCK_TOKENS // CLUSTER_TOKENS

PANEL_DIMS: Final = 64
"""Dimensions of values that lie together in a page: four vectors of sums, as many as a kernel keeps in registers."""

DIRECT_IO_BYTES: Final = 4096
"""Alignment that O_DIRECT and DMA ask for. A page's size is a multiple of it."""

PART_TOKENS: Final = 1024
"""Tokens of one part of a decode step; more query rows take larger parts. Parts are cut by shapes alone and merged in
position order, so a result never depends on the number of threads. `native/include/h3/types.hpp` holds the same number;
a test compares."""

ATTEND_BATCH_PAGES: Final = 4
"""Pages between two updates of the running softmax where many query rows share them. An attention that comes in runs of
pages is cut at multiples of it, so that the same numbers are added in the same order however it is cut.
`native/include/h3/types.hpp` holds the same number; a test compares."""

HEAD_DIM_MAX: Final = 256
"""Largest head dimension that `attend` accepts; its scratch is sized by it."""

assert EXTENT_CLASSES_BLOCKS[-1] == SEGMENT_BLOCKS_MAX
assert all(2 * a == b for a, b in itertools.pairwise(EXTENT_CLASSES_BLOCKS))
assert BLOCK_TOKENS % LANE_TOKENS == 0
assert PART_TOKENS % (ATTEND_BATCH_PAGES * BLOCK_TOKENS) == 0
