"""Names and facts that no model knows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Fact:
    """A sentence about a name that ends with a value, and the question for it."""

    statement: str
    """Up to the value; `{name}` stands for the name."""
    question: str
    values: tuple[str, ...]


NAMES: Final = (
    "Arvenholm",
    "Bellacroix",
    "Corrimund",
    "Dunsallow",
    "Estervane",
    "Farrowmere",
    "Gilderby",
    "Hollenstadt",
    "Istermoor",
    "Jarrowick",
    "Kelvarra",
    "Lindenthorpe",
    "Marrowgate",
    "Nethercombe",
    "Ostervald",
    "Pellingford",
)

_ADJECTIVES: Final = (
    "amber ancient bitter bronze clever copper crimson distant early eager fallen frozen gentle "
    "golden hidden hollow humble ivory jolly lonely marble misty narrow noble pale patient proud "
    "quiet rapid rusty scarlet silent silver simple sleepy solemn velvet violet winter young"
)

_NOUNS: Final = (
    "anchor badger barrel beacon candle castle cedar comet dragon eagle falcon fiddle garden hammer "
    "harbor kettle ladder lantern lemon meadow mirror needle orchid otter pepper pigeon pillow "
    "rabbit ribbon saddle shadow spider temple thistle tunnel turtle walnut willow window"
)
ADJECTIVES: Final = tuple(_ADJECTIVES.split())

NOUNS: Final = tuple(_NOUNS.split())
"""With an adjective each, names of lines."""

FACTS: Final = (
    Fact(
        "The lighthouse of {name} was built by",
        "Who built the lighthouse of {name}?",
        ("Tobias Merrick", "Clara Whitlock", "Simon Ashdown", "Helen Marsh"),
    ),
    Fact(
        "The favourite colour of the mayor of {name} is",
        "What is the favourite colour of the mayor of {name}?",
        ("purple", "orange", "green", "yellow"),
    ),
    Fact(
        "The night train to {name} leaves from platform",
        "From which platform does the night train to {name} leave?",
        ("7", "12", "23", "31"),
    ),
    Fact(
        "The bakery of {name} is famous for its",
        "What is the bakery of {name} famous for?",
        ("walnut bread", "cherry tarts", "ginger biscuits", "lemon cake"),
    ),
    Fact(
        "The number of bridges in {name} is",
        "What is the number of bridges in {name}?",
        ("214", "386", "571", "943"),
    ),
    Fact(
        "The old school of {name} was painted by",
        "Who painted the old school of {name}?",
        ("Edmund Farley", "Rosa Linton", "Martin Oakes", "Julia Penrose"),
    ),
    Fact(
        "The river that flows past {name} is called the",
        "What is the river that flows past {name} called?",
        ("Silverlane", "Brackwater", "Thornbeck", "Mistbourne"),
    ),
    Fact(
        "The clock tower of {name} was finished in the year",
        "In which year was the clock tower of {name} finished?",
        ("1687", "1742", "1819", "1893"),
    ),
)
