"""The probe of containers against a real server of ours."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from h3kv.rpc.addresses import UnixAddress
from h3kv.rpc.server import RpcServer, ServerConfig
from h3kv.supervisor import probe

pytestmark = pytest.mark.slow


def ask(address: str) -> int:
    return subprocess.run([sys.executable, "-I", "-S", probe.__file__, address], check=False).returncode


def test_the_probe_says_what_the_health_service_says(tmp_path: Path) -> None:
    address = UnixAddress(tmp_path / "x.sock")
    assert ask(str(address)) == 1, "nobody is there"
    server = RpcServer(ServerConfig(address))
    server.start()
    try:
        assert ask(str(address)) == 1, "it does not say that it serves"
        server.announce(is_serving=True)
        assert ask(str(address)) == 0
        assert all(probe.is_serving(str(address), timeout_s=5.0) for _ in range(20))
        server.announce(is_serving=False)
        assert ask(str(address)) == 1
    finally:
        assert server.stop(grace_ns=0)
    assert not probe.is_serving(str(address), timeout_s=1.0)


def test_a_socket_that_says_nothing_is_given_up(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as mute:
        mute.bind(str(tmp_path / "mute.sock"))
        mute.listen(1)
        assert not probe.is_serving(f"unix://{tmp_path}/mute.sock", timeout_s=0.1)


def test_a_page_that_is_not_there_is_no_yes() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        assert not probe.is_serving(f"http://127.0.0.1:{taken.getsockname()[1]}/health", timeout_s=1.0)
