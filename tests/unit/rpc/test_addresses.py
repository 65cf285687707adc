from pathlib import Path

import pytest

from h3kv.core.errors import ConfigError
from h3kv.rpc.addresses import Address, TcpAddress, UnixAddress, parse_address


@pytest.mark.parametrize(
    ("text", "address", "target"),
    [
        ("unix:///run/h3/nvme_io.sock", UnixAddress(Path("/run/h3/nvme_io.sock")), "unix:/run/h3/nvme_io.sock"),
        ("127.0.0.1:7401", TcpAddress("127.0.0.1", 7401), "127.0.0.1:7401"),
        ("nvme-io.h3.svc:0", TcpAddress("nvme-io.h3.svc", 0), "nvme-io.h3.svc:0"),
        ("[::1]:65535", TcpAddress("[::1]", 65535), "[::1]:65535"),
    ],
)
def test_addresses_are_read_and_written(text: str, address: Address, target: str) -> None:
    assert parse_address(text, field="listen") == address
    assert str(address) == text
    assert address.target == target


@pytest.mark.parametrize(
    "text",
    [
        "",
        "unix:relative.sock",
        "unix://relative.sock",
        "unix:///",
        "unix:///run/h3/",
        "unix:///run/\0.sock",
        "unix:///" + "x" * 200,
        "localhost",
        ":7401",
        "host:",
        "host:-1",
        "host:65536",
        "host:７",
        "host name:7401",
        "http://host:7401",
        "::1:7401",
        "host/path:7401",
    ],
)
def test_what_is_no_address_is_refused_by_the_settings_name(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^listen = ") as caught:
        parse_address(text, field="listen")
    assert caught.value.field == "listen"
