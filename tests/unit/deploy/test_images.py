"""The images of the processes against what the processes import."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from h3kv.telemetry.metric import Service

ROOT = Path(__file__).parents[3]
OURS = {"h3kv": ROOT / "src", "services": ROOT}


@pytest.mark.parametrize("name", [service.value for service in Service])
def test_image_has_every_package_that_its_process_imports_at_its_start(name: str) -> None:
    installed = with_requirements(packages_of(name))
    distributions = importlib.metadata.packages_distributions()
    imported = {root for root in foreign_imports(f"services.{name}.__main__") if root not in sys.stdlib_module_names}
    assert imported
    for root in imported:
        assert installed & {plain(each) for each in distributions[root]}, f"{name} imports {root}"


def packages_of(name: str) -> set[str]:
    """What the Dockerfile installs, by the names that it gives."""
    recipe = (ROOT / "services" / name / "Dockerfile").read_text(encoding="utf-8")
    common = (ROOT / "deploy/image/common.txt").read_text(encoding="utf-8")
    lines = re.findall(r"packages\.sh /opt/own (.*)", recipe)
    assert lines
    return {plain(each) for each in [*" ".join(lines).split(), *re.findall(r"(?m)^[a-z].*", common)]}


def plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def with_requirements(packages: Iterable[str]) -> set[str]:
    """These packages and all that they pull in without extras."""
    found: set[str] = set()
    waiting = list(packages)
    while waiting:
        package = waiting.pop()
        if package not in found:
            found.add(package)
            required = importlib.metadata.requires(package) or []
            names = [plain(re.split(r"[^\w.-]", each)[0]) for each in required if "extra ==" not in each]
            # What is for other systems is not here.
            waiting += [each for each in names if any(importlib.metadata.distributions(name=each))]
    return found


def foreign_imports(start: str) -> set[str]:
    """Packages of others that come with a module of ours when it is imported."""
    seen: set[str] = set()
    foreign: set[str] = set()
    waiting = [start]
    while waiting:
        module = waiting.pop()
        root = module.partition(".")[0]
        if root not in OURS:
            foreign.add(root)
        elif module not in seen:
            seen.add(module)
            waiting += [module.rpartition(".")[0]] if "." in module else []
            file = file_of(module)
            if file is not None:
                waiting += imports_of(ast.parse(file.read_text(encoding="utf-8")).body)
    return foreign


def file_of(module: str) -> Path | None:
    path = OURS[module.partition(".")[0]] / module.replace(".", "/")
    return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()), None)


def imports_of(body: Iterable[ast.stmt]) -> Iterator[str]:
    """Of statements that run at import: not of functions, and not of what is for type checkers."""
    for statement in body:
        match statement:
            case ast.Import():
                yield from (alias.name for alias in statement.names)
            case ast.ImportFrom(module=str(module), level=0):
                yield module
                yield from (f"{module}.{alias.name}" for alias in statement.names)
            case ast.If() if "TYPE_CHECKING" not in ast.unparse(statement.test):
                yield from imports_of([*statement.body, *statement.orelse])
            case ast.Try():
                yield from imports_of([*statement.body, *statement.orelse, *statement.finalbody])
