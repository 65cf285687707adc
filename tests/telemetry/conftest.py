"""The node that tests of its telemetry share: to start all processes takes longer than what is asked of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .node_rig import WholeNode, whole_node


@pytest.fixture(scope="session")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WholeNode]:
    with whole_node(tmp_path_factory.mktemp("node")) as running:
        yield running
