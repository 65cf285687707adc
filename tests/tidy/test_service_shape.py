"""All services are built alike."""

import ast
from pathlib import Path

import pytest

from .sources import ROOT, dotted, imports, parsed, shown

SERVICES = sorted(path.parent for path in (ROOT / "services").glob("*/__init__.py"))

FILES = {"README.md", "__init__.py", "__main__.py", "settings.py", "app.py", "metrics.py"}
SERVICER = "servicer.py"
HTTP_ONLY = {"gateway"}
"""Serve no gRPC."""
MAIN_LINES_MAX = 25


@pytest.mark.parametrize("service", SERVICES, ids=lambda path: path.name)
def test_service_has_the_files_of_its_kind(service: Path) -> None:
    found = {path.name for path in service.iterdir() if path.is_file()}
    needed = FILES if service.name in HTTP_ONLY else FILES | {SERVICER}
    assert needed - found == set()
    own = {name for name in found if name.endswith(".py")} - needed
    assert own, "a service has a file for its own idea"


@pytest.mark.parametrize("service", SERVICES, ids=lambda path: path.name)
def test_main_only_starts(service: Path) -> None:
    main = service / "__main__.py"
    assert len(main.read_text(encoding="utf-8").splitlines()) <= MAIN_LINES_MAX
    assert not [node for node in ast.walk(parsed(main)) if isinstance(node, ast.FunctionDef | ast.ClassDef)]


@pytest.mark.parametrize("service", SERVICES, ids=lambda path: path.name)
def test_settings_have_the_prefix_of_the_service(service: Path) -> None:
    text = (service / "settings.py").read_text(encoding="utf-8")
    assert f'env_prefix="H3_{service.name.upper()}_"' in text


@pytest.mark.parametrize("service", SERVICES, ids=lambda path: path.name)
def test_only_the_front_of_a_service_knows_its_settings(service: Path) -> None:
    allowed = {"settings.py", "app.py", "__main__.py"}
    module = f"services.{service.name}.settings"
    found = [shown(file) for file in service.glob("*.py") if file.name not in allowed and module in set(imports(file))]
    assert found == []


def test_only_one_place_reads_the_environment_for_all_services() -> None:
    found = [
        shown(file)
        for service in SERVICES
        for file in service.glob("*.py")
        for node in ast.walk(parsed(file))
        if isinstance(node, ast.Attribute) and dotted(node) in {"os.environ", "os.getenv"}
    ]
    assert found == []
