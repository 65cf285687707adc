import codecs
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from h3kv.engine.detokenizer import Detokenizer


def pieces(parts: list[bytes], stops: tuple[str, ...] = ()) -> list[str]:
    """Text of each token, until a stop string, then the rest. Token i is the i-th part."""
    detokenizer = Detokenizer(lambda token: parts[token], stops)
    texts: list[str] = []
    for token in range(len(parts)):
        texts.append(detokenizer.push(token))
        if detokenizer.stopped:
            break
    return [*texts, detokenizer.finish()]


def test_characters_are_given_out_when_they_are_complete() -> None:
    assert pieces([b"a\xc3", b"\xa9b", b"\xf0\x9f", b"\x98", b"\x80"]) == ["a", "\u00e9b", "", "", "\U0001f600", ""]


def test_invalid_bytes_become_replacement_characters() -> None:
    assert "".join(pieces([b"a\xff", b"b\xe2\x82", b"c"])) == "a\ufffdb\ufffdc"
    assert pieces([b"ok\xe2\x82"]) == ["ok", "\ufffd"]


def test_possible_beginning_of_a_stop_string_is_held_back() -> None:
    assert pieces([b"one\n", b"\nUs", b"ed", b"\n\nUser:", b"x"], ("\n\nUser:",)) == ["one", "", "\n\nUsed", "", ""]


def test_held_text_comes_out_at_the_end() -> None:
    assert pieces([b"one\n"], ("\n\n",)) == ["one", "\n"]


@pytest.mark.parametrize(
    ("text", "stops", "expected"),
    [
        ("abcXdef", ("X",), "abc"),
        ("abcdef", ("X",), "abcdef"),
        ("aXYbX", ("XY", "bX"), "a"),
        ("abcd", ("bcd", "c"), "ab"),
        ("abcd", ("bc", "c"), "a"),
        ("aab", ("ab",), "a"),
        ("aaab", ("aab",), "a"),
        ("X", ("X",), ""),
        ("h\u00e9!\U0001f600z", ("\U0001f600",), "h\u00e9!"),
    ],
)
def test_text_ends_before_the_stop_string_however_it_is_cut(text: str, stops: tuple[str, ...], expected: str) -> None:
    data = text.encode()
    for cuts in itertools.chain.from_iterable(itertools.combinations(range(1, len(data)), n) for n in (0, 1, 2, 3)):
        parts = [data[a:b] for a, b in itertools.pairwise([0, *cuts, len(data)])]
        assert "".join(pieces(parts, stops)) == expected, parts


def test_nothing_follows_a_stop_string() -> None:
    detokenizer = Detokenizer(lambda token: [b"aXb", b"c"][token], ("X",))
    assert detokenizer.push(0) == "a"
    assert detokenizer.stopped
    assert detokenizer.push(1) == ""
    assert detokenizer.finish() == ""


@given(
    parts=st.lists(st.one_of(st.binary(max_size=4), st.text(alphabet="ab\u00e9\u20ac", max_size=3).map(str.encode))),
    stops=st.lists(st.text(alphabet="ab\u00e9\u20ac", min_size=1, max_size=3), max_size=3),
)
def test_any_cut_gives_the_same_text_and_never_half_a_character(parts: list[bytes], stops: list[str]) -> None:
    whole = codecs.decode(b"".join(parts), "utf-8", errors="replace")
    ends = [(end, start) for stop in stops if (start := whole.find(stop)) >= 0 for end in [start + len(stop)]]
    expected = whole[: min(ends)[1]] if ends else whole
    texts = pieces(parts, tuple(stops))
    assert "".join(texts) == expected
    assert all(expected.startswith("".join(texts[:count])) for count in range(len(texts)))
