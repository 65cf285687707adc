import os
import socket
import stat
from pathlib import Path

import pytest

from h3kv.core.errors import AddressInUseError, ConfigError
from h3kv.rpc.addresses import UnixAddress
from h3kv.rpc.unix_socket import SocketClaim


def bound(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(os.fspath(path))
    listener.listen()
    return listener


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_only_the_owner_can_open_the_socket_from_its_first_moment(tmp_path: Path) -> None:
    path = tmp_path / "h3.sock"
    claim = SocketClaim(UnixAddress(path))
    with claim.binding(group=None):
        listener = bound(path)
        assert mode(path) == 0o600
    assert mode(path) == 0o600
    assert mode(tmp_path / "h3.sock.lock") == 0o600
    listener.close()
    claim.release()
    assert not path.exists()


def test_a_group_can_open_the_socket_when_it_is_named(tmp_path: Path) -> None:
    path = tmp_path / "h3.sock"
    claim = SocketClaim(UnixAddress(path))
    with claim.binding(group=os.getgid()), bound(path):
        pass
    assert mode(path) == 0o660
    assert path.stat().st_gid == os.getgid()
    claim.release()


def test_the_umask_is_as_before(tmp_path: Path) -> None:
    claim = SocketClaim(UnixAddress(tmp_path / "h3.sock"))
    before = os.umask(0o022)
    try:
        with claim.binding(group=None), bound(tmp_path / "h3.sock"):
            pass
        assert os.umask(0o022) == 0o022
    finally:
        os.umask(before)
    claim.release()


def test_a_claimed_socket_is_refused_until_it_is_released(tmp_path: Path) -> None:
    address = UnixAddress(tmp_path / "h3.sock")
    claim = SocketClaim(address)
    with pytest.raises(AddressInUseError, match="another process serves"):
        SocketClaim(address)
    claim.release()
    SocketClaim(address).release()


def test_a_socket_that_a_dead_process_left_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "h3.sock"
    bound(path).close()
    assert path.is_socket()
    claim = SocketClaim(UnixAddress(path))
    assert not path.exists()
    claim.release()


def test_a_socket_that_answers_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "h3.sock"
    with bound(path):
        with pytest.raises(AddressInUseError):
            SocketClaim(UnixAddress(path))
        assert path.is_socket()
    # The refused claim has let go of the lock.
    SocketClaim(UnixAddress(path)).release()


def test_what_is_no_socket_is_never_removed(tmp_path: Path) -> None:
    path = tmp_path / "h3.sock"
    path.write_text("precious")
    with pytest.raises(ConfigError, match="is no socket"):
        SocketClaim(UnixAddress(path))
    assert path.read_text() == "precious"


def test_a_missing_folder_is_an_error_that_names_the_cure(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="make its folder"):
        SocketClaim(UnixAddress(tmp_path / "absent" / "h3.sock"))
