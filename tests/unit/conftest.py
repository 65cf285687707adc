"""What unit tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from h3kv import _native


@pytest.fixture(params=["portable", "avx2", "avx512"])
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Forces one instruction set after the other."""
    name: str = request.param
    if name not in _native.isa_list():
        pytest.skip(f"this processor has no {name}")
    before = _native.isa_current()
    _native.isa_select(name)
    yield name
    _native.isa_select(before)
