import mmap
from collections.abc import Iterator

import pytest
from tests.unit.memory.mailbox_kit import GEOMETRY

from h3kv.memory.mailbox import Mailbox


@pytest.fixture
def memory() -> memoryview:
    return memoryview(mmap.mmap(-1, GEOMETRY.size_bytes))


@pytest.fixture
def mailbox(memory: memoryview) -> Iterator[Mailbox]:
    made = Mailbox.create(memory, GEOMETRY)
    yield made
    made.check_integrity()
