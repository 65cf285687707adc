import pytest
from hypothesis import given
from hypothesis import strategies as st

from h3kv.memory.messages import (
    MESSAGE_BYTES_MAX,
    Hello,
    MarkedHolder,
    Marker,
    Message,
    Refused,
    UnmapFirst,
    Welcome,
    decode,
    decode_marker,
    encode,
    encode_marker,
)
from h3kv.memory.region_format import REGIONS_MAX, RegionIdentity

TOKEN = bytes(range(16))
REGIONS = (RegionIdentity(1, "host", TOKEN), RegionIdentity(31, "mailbox_2", bytes(16)))
MANY = tuple(RegionIdentity(number, f"region_number_{number:02}", TOKEN) for number in range(REGIONS_MAX))


@pytest.mark.parametrize(
    "message",
    [
        Hello("gpu-worker.0", TOKEN, None, ()),
        Hello("a" * 63, TOKEN, 0xFFFE, REGIONS),
        Hello("a" * 63, TOKEN, 0xFFFE, MANY),
        Welcome(TOKEN, 2, REGIONS),
        UnmapFirst(),
        Refused("256 clients are connected already"),
    ],
)
def test_messages_come_back_as_they_were(message: Message) -> None:
    packet = encode(message)
    assert len(packet) <= MESSAGE_BYTES_MAX // 2
    assert decode(packet) == message


def test_marker_comes_back_as_it_was() -> None:
    marker = Marker(REGIONS, (MarkedHolder(2, "gpu-worker", TOKEN), MarkedHolder(3, "offload-0", bytes(16))))
    assert decode_marker(encode_marker(marker)) == marker


@pytest.mark.parametrize("name", ["", "A", "../x", "a b", "a" * 64, "-a", "a\n"])
def test_names_that_could_mean_something_else_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="its form"):
        decode(encode(Hello(name, TOKEN, None, ())))


def test_regions_that_are_named_twice_are_refused() -> None:
    for twice in [(REGIONS[0], RegionIdentity(1, "table", TOKEN)), (REGIONS[0], RegionIdentity(2, "host", TOKEN))]:
        with pytest.raises(ValueError, match="twice"):
            decode(encode(Hello("a", TOKEN, None, twice)))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["hello", "token", "holder", "regions", "welcome", "unmap", "x"]), inner)
    ),
    max_leaves=12,
)


@given(JSON)
def test_other_json_is_a_message_or_a_value_error(value: object) -> None:
    import json

    for reader in (decode, decode_marker):
        try:
            reader(json.dumps(value).encode())
        except ValueError:
            continue


@given(st.binary(max_size=64))
def test_other_bytes_are_a_value_error(packet: bytes) -> None:
    for reader in (decode, decode_marker):
        with pytest.raises(ValueError):  # noqa: PT011  json's own errors are among them
            reader(packet)
