import pytest
from hypothesis import given
from hypothesis import strategies as st

from h3kv.core.units import (
    TokenCount,
    describe_size,
    format_cap,
    format_duration,
    format_size,
    parse_cap,
    parse_duration,
    parse_size,
)


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("0B", 0),
        ("4GiB", 4 << 30),
        ("1.5 MiB", 3 << 19),
        (" 100MB ", 100_000_000),
        ("0.5KiB", 512),
        (4096, 4096),
    ],
)
def test_size_is_read_exactly(text: str | int, size_bytes: int) -> None:
    assert parse_size(text) == size_bytes


@pytest.mark.parametrize("text", ["", "4", "4 gigs", "-1GiB", "1e3MiB", "0.3B", "4gib", "GiB", "٣GiB", -1, True])
def test_what_is_not_a_size_is_refused_with_the_rule(text: str | int) -> None:
    with pytest.raises(ValueError, match="a size"):
        parse_size(text)


@pytest.mark.parametrize(
    ("text", "duration_ns"), [("250ms", 250_000_000), ("1.5s", 1_500_000_000), ("2h", 7_200 * 10**9), ("7 ns", 7)]
)
def test_duration_is_read_exactly(text: str, duration_ns: int) -> None:
    assert parse_duration(text) == duration_ns


@pytest.mark.parametrize("text", ["", "5", "1 fortnight", "0.5ns", "-1s"])
def test_what_is_not_a_duration_is_refused_with_the_rule(text: str) -> None:
    with pytest.raises(ValueError, match="a duration is a number and a unit"):
        parse_duration(text)


@given(st.integers(min_value=0, max_value=1 << 60))
def test_formatted_size_reads_back_as_itself(size_bytes: int) -> None:
    assert parse_size(format_size(size_bytes)) == size_bytes


@given(st.integers(min_value=0, max_value=1 << 60))
def test_formatted_duration_reads_back_as_itself(duration_ns: int) -> None:
    assert parse_duration(format_duration(duration_ns)) == duration_ns


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [(1 << 30, "1GiB"), (1536, "1536B"), (3 << 19, "1536KiB"), (0, "0B"), (10**9, "1000000000B")],
)
def test_exact_size_uses_the_largest_whole_unit(size_bytes: int, text: str) -> None:
    assert format_size(size_bytes) == text


@pytest.mark.parametrize(
    ("size_bytes", "text"), [(17, "17 B"), (1024, "1.00 KiB"), (3 << 29, "1.50 GiB"), (99 << 20, "99.0 MiB")]
)
def test_described_size_has_three_digits(size_bytes: int, text: str) -> None:
    assert describe_size(size_bytes) == text


@pytest.mark.parametrize(
    ("text", "cap"), [("2048tokens", TokenCount(2048)), (" 64 tokens ", TokenCount(64)), ("4GiB", 4 << 30), (7, 7)]
)
def test_caps_are_sizes_or_tokens(text: str | int, cap: int | TokenCount) -> None:
    assert parse_cap(text) == cap
    assert parse_cap(format_cap(cap)) == cap


@pytest.mark.parametrize("text", ["1.5tokens", "-1tokens", "tokens", "2048 tokns", "2048", True])
def test_what_is_no_cap_is_refused_with_the_rule(text: str | int) -> None:
    with pytest.raises(ValueError, match=r"tokens"):
        parse_cap(text)
