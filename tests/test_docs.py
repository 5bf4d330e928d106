"""Documents: links lead somewhere, files that are named exist, tables between markers are those of the rows."""

import gzip
import re

import pytest
from paths import ROOT

FIXED_PAGES = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "models/demo/README.md"]
PAGES = [*FIXED_PAGES, *(str(page.relative_to(ROOT)) for page in ROOT.glob("docs/**/*.md"))]
FOLDERS = "alspec|docs|kernels|launch|models|runtime|tests"
NAMED_FILE = re.compile(rf"(?<![\w/.-])(?:{FOLDERS})/[\w/.-]+\.(?:py|jsonl|json\.gz|png|md)\b")


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    """Links to files and to headings of them, and every path of a file that is named."""
    text = (ROOT / page).read_text(encoding="utf-8")
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        name, _, heading = link.partition("#")
        if "://" in link:
            continue
        target = (ROOT / page).parent / name if name else ROOT / page
        assert target.exists(), f"{page}: {link}"
        if heading:
            titles = re.findall(r"^#+ (.*)$", target.read_text(encoding="utf-8"), re.MULTILINE)
            assert heading in [re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles], link
    for path in NAMED_FILE.findall(text):
        assert (ROOT / path).exists(), f"{page}: {path}"


def test_files_that_comments_name_exist() -> None:
    for folder in set(FOLDERS.split("|")) - {"tests"}:
        for path in (ROOT / folder).rglob("*.py"):
            for named in NAMED_FILE.findall(path.read_text(encoding="utf-8")):
                assert (ROOT / named).exists(), f"{path.relative_to(ROOT)}: {named}"


def test_the_links_above_are_found() -> None:
    assert {"docs/lean_attention.md", "docs/results/README.md"} <= set(PAGES)
    assert NAMED_FILE.findall("see `alspec/verdict.py`.") == ["alspec/verdict.py"]


def test_nothing_shown_names_a_folder_of_a_machine() -> None:
    """Rows and the trace hold the commands that wrote them."""
    results = ROOT / "docs" / "results"
    files = [*results.glob("*.jsonl"), *results.glob("*.json.gz"), *(ROOT / page for page in PAGES)]
    for path in files:
        text = (gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()).decode()
        assert not re.search(r"(?<![\w.])/(?:root|home|tmp|work|mnt)/", text), path


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150


def test_the_index_has_every_document() -> None:
    """And each says in its title, or the line below it, which question it answers."""
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    for page in (ROOT / "docs").glob("*.md"):
        if page.name != "README.md":
            assert f"]({page.name})" in index, page.name
        title, _, first, *_ = page.read_text(encoding="utf-8").splitlines()
        assert "?" in title + first, page.name
