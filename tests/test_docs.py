"""README.md, CONTRIBUTING.md and docs/ agree with the code: packages, commands, flags, what fits, messages, links."""

import ast
import inspect
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import get_args

import pytest

from runtime.cli import exit_codes
from runtime.cli.main import (
    app,
    bench,
    bench_app,
    bench_compare,
    build,
    engines_app,
    engines_import,
    engines_prune,
    export,
    generate,
    jobs_app,
    jobs_delete,
    jobs_export,
    jobs_join,
    jobs_list,
    jobs_show,
    keys_app,
    models_app,
    models_download,
    models_verify,
    serve,
    serve_keys_add,
    web,
)
from runtime.core import events
from runtime.core.messages import MESSAGES
from tests.test_architecture import RANKS
from tools import docs_tables

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
DOCS = sorted((ROOT / "docs").glob("*.md"))
ARCHITECTURE = docs_tables.ARCHITECTURE.read_text(encoding="utf-8")
# Commands and flags must appear in these pages. Links and file names are checked in all pages.
TEXT = "\n".join([README, *(path.read_text(encoding="utf-8") for path in DOCS)])
PAGES = [*(ROOT / name for name in ("README.md", "CONTRIBUTING.md")), *DOCS]
PAGES += [*sorted((ROOT / "bench").glob("*.md")), *sorted((ROOT / "tools").glob("*.md"))]
PACKAGES = sorted(path.parent.name for path in (ROOT / "runtime").glob("*/__init__.py"))
MAX_LINES = 100


@cache
def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub forms them."""
    counts: dict[str, int] = {}
    found = set()
    for heading in re.findall(r"^#+ (.+)$", without_code(page), re.MULTILINE):
        slug = re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")
        number = counts[slug] = counts.get(slug, -1) + 1
        found.add(f"{slug}-{number}" if number else slug)
    return found


def without_code(page: Path) -> str:
    """Return the text of a page without code blocks, in which # does not start a heading."""
    return re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def page_id(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def test_the_readme_is_short() -> None:
    assert len(README.splitlines()) <= MAX_LINES


def test_every_package_is_listed() -> None:
    table = ARCHITECTURE.partition("## Packages")[2].partition("##")[0]
    rows = re.findall(r"^\| (`.+/`) \|", table, re.MULTILINE)
    assert sorted(re.findall(r"`(\w+)/`", " ".join(rows))) == PACKAGES


def test_the_import_order_is_the_enforced_one() -> None:
    found = re.search(r"^`(core <- .+) <- app\.py`", ARCHITECTURE, re.MULTILINE)
    assert found is not None
    ranks = {name: rank for rank, group in enumerate(found[1].split(" <- ")) for name in group.split(", ")}
    assert ranks == RANKS


def test_stated_lines_are_close_to_the_code() -> None:
    parts = docs_tables.hand_written(ARCHITECTURE)
    assert len(parts) > 10
    for part, (stated, counted) in parts.items():
        assert abs(stated - counted) <= 0.1 * counted + 20, f"{part}: run python -m tools.docs_tables"


FUNCTIONS: list[Callable[..., object]] = [
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
    jobs_export,
    jobs_join,
    bench,
    bench_compare,
    serve,
    serve_keys_add,
]


def test_every_flag_is_documented(subtests: pytest.Subtests) -> None:
    shown = {"as_json": "--json", "context": "", "file": "FILE", "prompt": "PROMPT"}
    shown |= {"job": "ID", "ids": "ID", "name": "NAME", "names": "NAME"}
    shown |= {"clip": "ID", "clips": "ID", "kind": "--format"}
    shown |= {"flags": "", "first": "A.json", "second": "B.json"}
    for function in FUNCTIONS:
        with subtests.test(msg=function.__name__):
            names = inspect.signature(function).parameters
            flags = [shown.get(name, f"--{name.replace('_', '-')}") for name in names]
            assert [flag for flag in flags if flag not in TEXT] == []


def test_flags_for_users_of_other_programs_exist() -> None:
    rows = re.findall(r"^\|.*\|(.+)\|$", (ROOT / "docs" / "coming-from.md").read_text(encoding="utf-8"), re.MULTILINE)
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", " ".join(rows)))
    known = {f"--{name.replace('_', '-')}" for function in FUNCTIONS for name in inspect.signature(function).parameters}
    assert len(named) > 20 and named <= known


def test_the_table_of_options_is_up_to_date() -> None:
    page = docs_tables.COMMANDS.read_text(encoding="utf-8")
    assert "| `--width N` |" in page
    assert page == docs_tables.with_options(page), "run python -m tools.docs_tables"


def test_the_readme_states_what_runs_as_the_planner_does() -> None:
    assert "<!-- cards readme -->" in README
    assert docs_tables.with_cards(README) == README, "run python -m tools.docs_tables"


@pytest.mark.slow
def test_the_page_of_cards_is_up_to_date() -> None:
    page = docs_tables.CARDS.read_text(encoding="utf-8")
    assert re.findall("<!-- cards (.+) -->", page) == ["by card", "by machine"]
    assert docs_tables.with_cards(page) == page, "run python -m tools.docs_tables"


def test_the_table_of_variants_is_that_of_the_catalogue() -> None:
    page = docs_tables.MODELS.read_text(encoding="utf-8")
    assert docs_tables.with_variants(page) == page, "run python -m tools.docs_tables"


def test_every_command_is_documented() -> None:
    text = docs_tables.COMMANDS.read_text(encoding="utf-8")
    for command in app.registered_commands:
        assert command.callback is not None
        assert f"`{command.name or command.callback.__name__}" in text
    groups = (
        ("engines", engines_app),
        ("models", models_app),
        ("jobs", jobs_app),
        ("bench", bench_app),
        ("serve keys", keys_app),
    )
    for name, group in groups:
        for command in group.registered_commands:
            shown = command.hidden or re.search(rf"`{name} [\w|\\]*{command.name}", text)
            assert shown, command.name


def test_exit_codes_are_documented() -> None:
    meanings = {
        exit_codes.DONE: "done",
        exit_codes.USER_ERROR: "user error",
        exit_codes.INTERNAL_ERROR: "internal error",
        exit_codes.CANCELLED: "cancelled",
    }
    for code, meaning in meanings.items():
        assert re.search(rf"^\| {code} \| {meaning}", TEXT, re.MULTILINE), code


def templates() -> list[str]:
    """Return the templates of all messages and of what the installers print, with {…} for each value."""
    setup = ast.parse((ROOT / "tools" / "setup_env.py").read_text(encoding="utf-8"))
    printed = [
        "".join(str(part.value) if isinstance(part, ast.Constant) else "{…}" for part in node.values)
        for node in ast.walk(setup)
        if isinstance(node, ast.JoinedStr)
    ]
    printed += [
        node.value for node in ast.walk(setup) if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    script = (ROOT / "install.sh").read_text(encoding="utf-8")
    printed += [re.sub(r"\$\{?\w+\S*\}?", "{…}", text) for text in re.findall(r'say "(.+)"', script)]
    return [*(message.what for message in MESSAGES.values()), *(f"Tandem setup: {text}" for text in printed)]


def test_quoted_messages_are_those_that_tandem_prints(subtests: pytest.Subtests) -> None:
    # A template that is only values, or a few words beside them, would match anything.
    known = [template for template in templates() if len(re.sub(r"\{[^{}]*\}", "", template)) > 12]
    patterns = [".+".join(map(re.escape, re.split(r"\{[^{}]*\}", template))) for template in known]
    quotes = re.findall(r"^> (.+)$", TEXT, re.MULTILINE)
    assert len(quotes) > 30
    for quote in quotes:
        with subtests.test(msg=quote):
            assert any(re.fullmatch(pattern, quote) for pattern in patterns)


def test_links_resolve(subtests: pytest.Subtests) -> None:
    for page in PAGES:
        for link in re.findall(r"\]\(([^)\s]+)\)", without_code(page)):
            if link.startswith("https://"):
                continue
            with subtests.test(msg=f"{page_id(page)}: {link}"):
                target, _, anchor = link.partition("#")
                linked = (page.parent / target).resolve() if target else page
                assert linked.exists()
                assert not anchor or anchor in anchors(linked)


def test_the_readme_links_to_every_page() -> None:
    assert [page_id(page) for page in DOCS if f"]({page_id(page)})" not in README] == []


def test_every_event_is_documented() -> None:
    for event in get_args(events.Event):
        assert re.search(rf"\b{event.__name__}\b", ARCHITECTURE), event.__name__


def test_named_files_exist() -> None:
    named = {
        (page_id(page), name)
        for page in PAGES
        for name in re.findall(r"`((?:bench|runtime|tests|tools)/[\w./]+)`", page.read_text(encoding="utf-8"))
    }
    assert [(page, name) for page, name in sorted(named) if not (ROOT / name).exists()] == []
