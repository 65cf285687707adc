from pathlib import Path

import pytest

from h3kv.core.errors import ConfigError
from h3kv.rpc.addresses import TcpAddress, UnixAddress
from h3kv.rpc.credentials import (
    Credentials,
    TlsFiles,
    channel_credentials,
    check_protected,
    read_token,
    server_credentials,
    token_matches,
)

TOKEN = "0123456789abcdef" * 2


def test_a_token_is_read_without_the_space_around_it(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text(f" {TOKEN}\n")
    assert read_token(path, setting="token_file") == TOKEN


@pytest.mark.parametrize("text", ["", "short", TOKEN + " " + TOKEN, "é" * 40, "x" * 600])
def test_what_is_no_token_is_refused_and_not_shown(tmp_path: Path, text: str) -> None:
    path = tmp_path / "token"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"^token_file: ") as caught:
        read_token(path, setting="token_file")
    assert not text or text not in str(caught.value)


def test_a_missing_token_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="absent"):
        read_token(tmp_path / "absent", setting="token_file")


def test_only_the_token_itself_matches() -> None:
    assert token_matches(TOKEN, TOKEN)
    for other in (None, "", TOKEN[:-1], TOKEN.upper(), "\udcff"):
        assert not token_matches(other, TOKEN)


def test_a_token_is_not_shown() -> None:
    assert TOKEN not in repr(Credentials(token=TOKEN))


def test_a_port_needs_protection_and_a_socket_file_does_not() -> None:
    port = TcpAddress("127.0.0.1", 7401)
    check_protected(UnixAddress(Path("/run/h3.sock")), Credentials(), setting="listen")
    check_protected(port, Credentials(token=TOKEN), setting="listen")
    with pytest.raises(ConfigError, match="listen = 127"):
        check_protected(port, Credentials(), setting="listen")


def test_certificates_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    files = TlsFiles(tmp_path / "cert.pem", tmp_path / "key.pem", tmp_path / "ca.pem")
    for make in (server_credentials, channel_credentials):
        with pytest.raises(ConfigError, match=r"cert\.pem"):
            make(files, setting="tls")
