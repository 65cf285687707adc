import ast
import re
from pathlib import Path

from .sources import ROOT, dotted, files, imports, parsed, shown

BANNED = {
    "time.time": "a Clock, or time.perf_counter_ns for a measurement",
    "time.sleep": "poll with a deadline, or move the clock",
    "os.environ": "the settings of h3kv.config",
    "os.getenv": "the settings of h3kv.config",
    "print": "rich in the command line, a log elsewhere",
}
ALLOWED = {
    "src/h3kv/__init__.py": {"os.environ"},
    "src/h3kv/config.py": {"os.environ"},
    "src/h3kv/service_settings.py": {"os.environ"},
    "src/h3kv/cli": {"print"},
    "src/h3kv/bench": {"print", "os.environ"},
    "tests": {"os.environ", "print"},
    "tools": {"print", "os.environ"},
    "examples": {"print"},
}
MODULES = {
    "pickle": "safetensors, or a format of our own: unpickling runs what it reads",
    "marshal": "a format of our own",
    "unittest.mock": "a fake",
}
MENTIONS = re.compile(
    r"/(?:wor[k]|hom[e]|roo[t])/|\.librar[y]\b|pypi\.or[g]|pythonhosted\.or[g]|huggingface\.c[o]\b|npmjs\.or[g]",
    re.IGNORECASE,
)
"""Paths of one machine, and hosts that a build must not name."""

TEXTS = (".py", ".md", ".toml", ".txt", ".yaml", ".yml", ".cpp", ".hpp", ".proto", ".json", ".sh", "Makefile", "run")


def test_banned_names_have_a_replacement() -> None:
    found = [
        f"{shown(file)}:{node.lineno} uses {name}: use {BANNED[name]}"
        for file in files(".py")
        for node in ast.walk(parsed(file))
        if isinstance(node, ast.Name | ast.Attribute) and (name := dotted(node)) in BANNED and name not in allowed(file)
    ]
    assert found == []


def test_banned_modules_have_a_replacement() -> None:
    found = [
        f"{shown(file)} imports {name}: use {MODULES[name]}"
        for file in files(".py")
        for name in imports(file)
        if name in MODULES
    ]
    assert found == []


def test_chance_comes_from_a_generator_that_is_seeded() -> None:
    found = [
        f"{shown(file)}:{node.lineno} uses {name}: use random.Random(seed), or a generator of torch or numpy"
        for file in files(".py")
        for node in ast.walk(parsed(file))
        if isinstance(node, ast.Attribute)
        and (name := dotted(node)).startswith(("random.", "np.random."))
        and name not in {"random.Random", "np.random.default_rng", "np.random.Generator"}
    ]
    assert found == []


def test_texts_name_no_machine_and_no_registry() -> None:
    found = [
        f"{shown(file)}:{number}: {match[0]}"
        for file in files(*TEXTS)
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1)
        for match in MENTIONS.finditer(line)
    ]
    assert found == []


def test_open_ends_are_not_left_in_the_code() -> None:
    found = [
        f"{shown(file)}:{number}: {line.strip()}"
        for file in files(".py", ".cpp", ".hpp", "Makefile")
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1)
        if re.search(r"\b(?:TOD[O]|FIXM[E]|XX[X]|HAC[K])\b", line)
    ]
    assert found == []


def allowed(file: Path) -> set[str]:
    path = file.relative_to(ROOT).as_posix()
    return set().union(*(names for start, names in ALLOWED.items() if path == start or path.startswith(f"{start}/")))
