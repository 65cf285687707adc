"""What is on the disk before what."""

from __future__ import annotations

import contextlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from h3kv.core.types import Move
from h3kv.testing.cold_segments import LAYOUT, moves_of, open_store, restore, settle, write_segments
from h3kv.testing.faulty_files import FaultPlan, FaultyFiles
from h3kv.tiers.cold.geometry import MIB
from h3kv.tiers.io import FLUSH, WRITE


def test_header_that_means_nothing_is_off_the_disk_before_anything_is_written_over_its_data(tmp_path: Path) -> None:
    with contextlib.closing(open_store(tmp_path)) as store:
        moves = moves_of(store.reserve([16, 16]), 1, 16, layout=LAYOUT)
        store.submit([Move(move.key, move.target, move.source) for move in moves])
        assert [completion.error for completion in settle(store, 2)] == [None, None]
    seen: list[tuple[int, int, bool]] = []

    class Recording(FaultyFiles):
        def submit(self, ops_N: NDArray[np.void]) -> None:
            seen.extend((int(op["kind"]), int(op["offset"]), bool(op["crcs"])) for op in ops_N)
            super().submit(ops_N)

    with contextlib.closing(open_store(tmp_path, engine=lambda files: Recording(files, FaultPlan()))) as store:
        assert restore(store) == {}
        store.reserve([4, 4])
        write_segments(store, [(2, 4)])
    gone, over = seen.index((WRITE, MIB, False)), next(at for at, (_, _, is_data) in enumerate(seen) if is_data)
    assert FLUSH in [kind for kind, _, _ in seen[gone:over]]
