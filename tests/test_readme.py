"""README.md and docs/ keep up with the code: the tree, the commands and their flags. Their links lead somewhere."""

import inspect
import re
from pathlib import Path

import pytest

from runtime.cli import exit_codes
from runtime.cli.bench_commands import bench, bench_app, bench_compare
from runtime.cli.main import (
    app,
    build,
    engines_app,
    engines_import,
    engines_prune,
    export,
    generate,
    jobs_app,
    jobs_delete,
    jobs_list,
    jobs_show,
    web,
)
from runtime.cli.models_app import models_app, models_download, models_verify
from tools import request_table

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
DOCS = sorted((ROOT / "docs").glob("*.md"))
# What is held to the code; links are followed from the pages beside code as well.
TEXT = "\n".join([README, *(path.read_text(encoding="utf-8") for path in DOCS)])
PAGES = [ROOT / "README.md", *DOCS, *sorted((ROOT / "bench").glob("*.md")), *sorted((ROOT / "tools").glob("*.md"))]
MAX_LINES = 200


def anchors(page: Path) -> set[str]:
    """Return what a link into a page may name after its #: a heading as GitHub spells it."""
    found: dict[str, int] = {}
    spelt = set()
    for heading in re.findall(r"^#+ (.+)$", without_code(page), re.MULTILINE):
        slug = re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")
        again = found[slug] = found.get(slug, -1) + 1
        spelt.add(f"{slug}-{again}" if again else slug)
    return spelt


def without_code(page: Path) -> str:
    """Return a page without its blocks of code, where a # begins no heading."""
    return re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def named(page: Path) -> str:
    """Return a page's name for a test."""
    return page.relative_to(ROOT).as_posix()


def test_the_readme_can_be_read_at_once() -> None:
    assert len(README.splitlines()) <= MAX_LINES


def test_every_package_has_its_line_in_the_readme() -> None:
    packages = [path.parent.name for path in (ROOT / "runtime").glob("*/__init__.py")]
    assert sorted(re.findall(r"^  (\w+)/ +\S", README, re.MULTILINE)) == sorted(packages)


@pytest.mark.parametrize(
    "function",
    [
        generate,
        web,
        build,
        export,
        engines_prune,
        engines_import,
        models_download,
        models_verify,
        jobs_list,
        jobs_show,
        jobs_delete,
        bench,
        bench_compare,
    ],
)
def test_every_flag_is_named(function: object) -> None:
    shown = {"as_json": "--json", "context": "", "file": "FILE", "prompt": "PROMPT"}
    shown |= {"job": "ID", "ids": "ID", "name": "NAME", "names": "NAME"}
    shown |= {"flags": "", "one": "A.json", "other": "B.json"}
    for name in inspect.signature(function).parameters:  # type: ignore[arg-type]
        assert shown.get(name, f"--{name.replace('_', '-')}") in TEXT, name


def test_the_table_of_options_is_up_to_date() -> None:
    page = request_table.PAGE.read_text(encoding="utf-8")
    assert "| `--width N` |" in page
    assert page == request_table.updated(page), "run python -m tools.request_table"


@pytest.mark.parametrize("page", ["README.md", "docs/commands.md"])
def test_every_command_is_named(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    for command in app.registered_commands:
        assert command.callback is not None
        assert f"`{command.name or command.callback.__name__}" in text
    groups = (("engines", engines_app), ("models", models_app), ("jobs", jobs_app), ("bench", bench_app))
    for name, group in groups:
        for command in group.registered_commands:
            shown = command.hidden or re.search(rf"`{name} [\w|\\]*{command.name}", text)
            assert shown, command.name


def test_the_exit_codes_are_named() -> None:
    told = re.search(r"Exit codes: (.+?)\n\n", README, re.DOTALL)
    assert told is not None
    meanings = {
        exit_codes.DONE: "done",
        exit_codes.USER_ERROR: "user error",
        exit_codes.INTERNAL_ERROR: "internal error",
    }
    meanings[exit_codes.CANCELLED] = "cancelled"
    for code, meaning in meanings.items():
        assert f"{code} {meaning}" in " ".join(told[1].split()), code
        assert re.search(rf"^\| {code} \| {meaning}", TEXT, re.MULTILINE), code


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", without_code(page)):
        if link.startswith("https://"):
            continue
        target, _, anchor = link.partition("#")
        there = (page.parent / target).resolve() if target else page
        assert there.exists(), link
        assert not anchor or anchor in anchors(there), link


@pytest.mark.parametrize("page", DOCS, ids=named)
def test_the_readme_leads_to_every_page(page: Path) -> None:
    assert f"]({named(page)})" in README


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_files_that_are_named_are_there(page: Path) -> None:
    for name in re.findall(r"`((?:bench|runtime|tests|tools)/[\w./]+)`", page.read_text(encoding="utf-8")):
        assert (ROOT / name).exists(), name
