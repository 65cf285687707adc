import inspect
import re

from h3kv.core import errors
from h3kv.core.error_codes import Code, Retry
from h3kv.core.errors import H3Error

ROW = re.compile(
    r"^ *[├└│─ ]*(?P<name>\w+Error)(?: +(?P<code>[A-Z_]+|code) +(?P<retry>\w+) +(?P<advice>\S.*))?$", re.MULTILINE
)


def classes() -> dict[str, type[H3Error]]:
    members = inspect.getmembers(errors, inspect.isclass)
    return {name: member for name, member in members if issubclass(member, H3Error)}


def rows() -> dict[str, re.Match[str]]:
    assert errors.__doc__ is not None
    return {match["name"]: match for match in ROW.finditer(errors.__doc__)}


def test_every_error_has_a_row_in_the_tree_and_every_row_a_class() -> None:
    assert set(rows()) == set(classes())


def test_rows_say_the_code_and_the_retry_of_the_class() -> None:
    for name, row in rows().items():
        if row["code"] is not None and name != "H3Error":
            kind = classes()[name]
            assert (Code(row["code"]), Retry(row["retry"])) == (kind.code, kind.retry), name


def test_rows_are_indented_below_their_base() -> None:
    column = {name: row.start("name") - row.start() for name, row in rows().items()}
    for name, kind in classes().items():
        if kind is not H3Error:
            base = kind.__mro__[1].__name__
            assert column[base] < column[name], f"{name} stands beside {base}"


def test_reasons_are_unique() -> None:
    reasons = [kind.reason for kind in classes().values() if kind is not H3Error]
    assert len(reasons) == len(set(reasons))
