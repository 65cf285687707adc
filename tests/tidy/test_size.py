import ast

from .sources import files, parsed, shipped, shown

MODULE_LINES_MAX = 400
FUNCTION_LINES_MAX = 60
POSITIONAL_MAX = 4
"""`self` and `cls` apart."""

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def test_modules_are_short() -> None:
    long = [
        f"{shown(file)}: {lines} lines"
        for file in files(".py")
        if (lines := len(file.read_text(encoding="utf-8").splitlines())) > MODULE_LINES_MAX
    ]
    assert long == []


def test_functions_fit_a_screen() -> None:
    long = [
        f"{shown(file)}:{node.lineno} {node.name}: {lines} lines"
        for file in files(".py")
        for node in ast.walk(parsed(file))
        if isinstance(node, FUNCTIONS)
        and (lines := (node.end_lineno or node.lineno) - node.lineno + 1) > FUNCTION_LINES_MAX
    ]
    assert long == []


def test_functions_take_four_positional_arguments_at_most() -> None:
    many = [
        f"{shown(file)}:{node.lineno} {node.name}"
        for file in shipped(".py")
        for node in ast.walk(parsed(file))
        if isinstance(node, FUNCTIONS) and positional(node) > POSITIONAL_MAX and not is_called_by_a_library(node)
    ]
    assert many == []


def positional(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    names = [argument.arg for argument in (*node.args.posonlyargs, *node.args.args)]
    return len(names) - (names[:1] in (["self"], ["cls"]))


def is_called_by_a_library(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Commands, which typer calls with keywords, and methods whose signature is pydantic's."""
    decorators = [ast.unparse(decorator) for decorator in node.decorator_list]
    return node.name == "settings_customise_sources" or any(".command" in decorator for decorator in decorators)
