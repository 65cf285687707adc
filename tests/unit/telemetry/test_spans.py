import re

from h3kv.telemetry import spans
from h3kv.telemetry.spans import ATTRIBUTES, SPANS


def constants(start: str) -> set[str]:
    return {value for value in vars(spans).values() if isinstance(value, str) and re.fullmatch(start, value)}


def test_every_name_is_declared_and_has_a_constant() -> None:
    services = "|".join(span.service for span in SPANS.values())
    assert constants(rf"(?:{services})\.[a-z_]+") == set(SPANS)
    assert constants(r"h3\..*") == set(ATTRIBUTES)


def test_every_span_has_a_place_in_a_trace() -> None:
    for span in SPANS.values():
        assert span.begins_trace or span.parents, f"{span.name} can never be recorded"
        assert set(span.parents) <= set(SPANS), span.name
        assert set(span.attributes) <= set(ATTRIBUTES), span.name


def test_the_drawing_shows_the_declared_parents() -> None:
    assert spans.__doc__ is not None
    drawn: set[tuple[str, str]] = set()
    path: dict[int, str] = {}
    for indent, name in re.findall(r"^    ( *)([a-z_]+\.[a-z_]+)", spans.__doc__, re.MULTILINE):
        depth = len(indent) // 2
        path[depth] = name
        drawn |= {(path[depth - 1], name)} if depth else set()
    declared = {(parent, span.name) for span in SPANS.values() for parent in span.parents}
    assert drawn <= declared
    assert {child for _, child in drawn} == {span.name for span in SPANS.values() if span.parents}


def test_sentences_end_as_sentences() -> None:
    for sentence in [*ATTRIBUTES.values(), *(span.sentence for span in SPANS.values())]:
        assert sentence.endswith("."), sentence
