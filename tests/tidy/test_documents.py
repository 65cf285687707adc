import re
from pathlib import Path

from .sources import files, shown

LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)(?:\s+\"[^\"]*\")?\)")
FENCE = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)
HEADING = re.compile(r"^(#+) +(.+?) *$", re.MULTILINE)
ADR_LINES_MAX = 50


def prose(file: Path) -> str:
    """The text without its code."""
    return FENCE.sub("", file.read_text(encoding="utf-8"))


def anchors(file: Path) -> set[str]:
    """Names of the headings, as they are used behind `#` in a link."""
    titles = (title.lower() for _, title in HEADING.findall(prose(file)))
    return {re.sub(r"[^\w\- ]", "", title).replace(" ", "-") for title in titles}


def test_every_document_has_one_title_on_top() -> None:
    for file in files(".md"):
        titles = [title for level, title in HEADING.findall(prose(file)) if level == "#"]
        assert len(titles) == 1, f"{shown(file)}: {titles}"
        assert prose(file).lstrip().startswith("# "), f"{shown(file)} begins with something else"


def test_relative_links_lead_somewhere() -> None:
    dead = []
    for file in files(".md"):
        for link in LINK.findall(prose(file)):
            if re.match(r"[a-z]+:", link):
                continue
            path, _, anchor = link.partition("#")
            target = (file.parent / path).resolve() if path else file
            if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
                dead.append(f"{shown(file)}: {link}")
    assert dead == []


def test_decision_records_are_short_and_listed() -> None:
    records = [file for file in files(".md", under="docs/adr") if file.name != "README.md"]
    assert records
    index = (records[0].parent / "README.md").read_text(encoding="utf-8")
    for file in records:
        assert len(file.read_text(encoding="utf-8").splitlines()) <= ADR_LINES_MAX, shown(file)
        assert f"({file.name})" in index, f"{shown(file)} is not in the index"
