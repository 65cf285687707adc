import ast
import re
import sys
import tomllib
from pathlib import Path

from .sources import ROOT, files, imports, module_name, parsed, shipped, shown

ENTRY_POINTS = {"h3kv", "h3kv.__main__", "h3kv.cli", "h3kv.node", "h3kv.h3_attention", "h3kv.h3_kv_cache", "h3kv.hf"}
"""Front doors: users import or run them."""

ORACLES = {"h3kv.attention.reference"}
"""Slow and plain: what tests compare with."""

EXTRAS = re.compile(r"/h3kv/(?:bench|hf|testing)/")
"""What needs the optional requirements."""

SERVICES = re.compile(r"/h3kv/(?:cli|directory|telemetry|testing)/|/services/")
"""What may use the requirements of the processes."""

MODULE_OF = {
    "googleapis-common-protos": "google",
    "grpcio": "grpc",
    "grpcio-health-checking": "grpc_health",
    "grpcio-reflection": "grpc_reflection",
    "grpcio-status": "grpc_status",
    "opentelemetry-api": "opentelemetry",
    "opentelemetry-exporter-otlp-proto-grpc": "opentelemetry",
    "opentelemetry-sdk": "opentelemetry",
    "prometheus-client": "prometheus_client",
    "protobuf": "google",
    "pydantic-settings": "pydantic_settings",
    "pyyaml": "yaml",
}
"""Where a distribution's module is called otherwise."""


def test_every_module_is_imported_by_another() -> None:
    modules = {module_name(file): file for file in shipped(".py")}
    imported: dict[str, set[str]] = {}
    for file in files(".py"):
        for name in imports(file):
            imported.setdefault(name, set()).add(shown(file))
    orphans = [
        name
        for name, file in modules.items()
        if not is_entry_point(name, file) and not users(imported.get(name, set()), name, file)
    ]
    assert orphans == []


def is_entry_point(name: str, file: Path) -> bool:
    """Packages, front doors, and what another interpreter runs as a program."""
    return file.name in {"__init__.py", "__main__.py"} or name in ENTRY_POINTS or "/bench/peers/" in file.as_posix()


def users(importers: set[str], name: str, file: Path) -> set[str]:
    """Files that use a module. Only the test kit may live from tests alone."""
    others = importers - {shown(file)}
    lives_from_tests = name.startswith("h3kv.testing") or name in ORACLES
    return others if lives_from_tests else {path for path in others if path.startswith(("src/", "services/"))}


def test_packages_say_what_they_are() -> None:
    silent = [shown(file) for file in shipped("__init__.py") if ast.get_docstring(parsed(file)) is None]
    assert silent == []


def test_listed_names_exist_and_package_fronts_list_all_they_give() -> None:
    for file in shipped(".py"):
        given, listed = public_names(file), listed_names(file)
        if listed is None:
            assert file.name != "__init__.py" or not given, f"{shown(file)} lacks __all__ for {sorted(given)}"
            continue
        assert len(listed) == len(set(listed)), f"{shown(file)} lists a name twice"
        missing = set(listed) - given - {"__version__"}
        assert not missing, f"{shown(file)} lists {sorted(missing)}, which it does not have"
        if file.name == "__init__.py":
            hidden = given - set(listed)
            assert not hidden, f"{shown(file)} has {sorted(hidden)}, which __all__ does not list"


def public_names(file: Path) -> set[str]:
    """Names without an underscore that a module defines or imports at its top level."""
    names: set[str] = set()
    for node in parsed(file).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.ImportFrom) and node.module != "__future__":
            names.update(alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names.update(target.id for target in targets if isinstance(target, ast.Name))
    return {name for name in names if not name.startswith("_")}


def listed_names(file: Path) -> list[str] | None:
    for node in parsed(file).body:
        if isinstance(node, ast.Assign) and [getattr(target, "id", "") for target in node.targets] == ["__all__"]:
            names: list[str] = ast.literal_eval(node.value)
            return names
    return None


def test_declared_requirements_are_used_and_pinned() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    used = {name.split(".")[0] for file in shipped(".py") for name in imports(file)}
    pinned = set(re.findall(r"^([\w.-]+)==", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE))
    pinned = {normal(name) for name in pinned}
    for requirement in project["dependencies"] + project["optional-dependencies"]["services"]:
        name = bare(requirement)
        assert MODULE_OF.get(name, name) in used, f"{name} is required, but nothing imports it"
    for requirement in sum(project["optional-dependencies"].values(), project["dependencies"]):
        assert bare(requirement) in pinned, f"{requirement} has no exact version in constraints.txt"


def test_imported_distributions_are_declared() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    declared = {MODULE_OF.get(bare(text), bare(text)) for text in project["dependencies"]}
    for file in shipped(".py"):
        if "/bench/peers/" in file.as_posix():
            continue  # Runs in an interpreter of its own, where the peer is installed.
        allowed = declared | ({"transformers"} if EXTRAS.search(file.as_posix()) else set())
        if SERVICES.search(file.as_posix()):
            allowed |= {MODULE_OF.get(bare(text), bare(text)) for text in project["optional-dependencies"]["services"]}
        top = {name.split(".")[0] for name in imports(file)} - {"h3kv", "services"} - sys.stdlib_module_names
        assert top <= allowed, f"{shown(file)} imports {sorted(top - allowed)}"


def bare(requirement: str) -> str:
    found = re.match(r"[\w.-]+", requirement)
    assert found is not None
    return normal(found[0])


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
