"""The README keeps up with the code: the tree, the commands and their flags."""

import inspect
import re
from pathlib import Path

import pytest

from runtime.cli.bench_commands import bench, bench_app, bench_compare, bench_forward
from runtime.cli.main import (
    app,
    build,
    engines_app,
    engines_import,
    engines_prune,
    export,
    jobs_app,
    jobs_delete,
    jobs_list,
    jobs_show,
    web,
)
from runtime.cli.models_app import models_app, models_download, models_verify
from runtime.cli.request_flags import request_from_flags

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
MODULES = sorted(path for path in (ROOT / "runtime").rglob("*.py") if path.name != "__init__.py")


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_every_module_has_its_line_in_the_tree(path: Path) -> None:
    assert re.search(rf"^ {{4,8}}{re.escape(path.name)}\s+\S", README, re.MULTILINE)


def test_the_tree_names_nothing_that_is_gone() -> None:
    named = re.findall(r"^ {4,8}(\w+\.py)\s", README, re.MULTILINE)
    assert set(named) <= {path.name for path in MODULES}


@pytest.mark.parametrize(
    "function",
    [
        request_from_flags,
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
        bench_forward,
    ],
)
def test_every_flag_is_named(function: object) -> None:
    shown = {"as_json": "--json", "context": "", "file": "FILE", "prompt": "PROMPT", "version": ""}
    shown |= {"job": "ID", "ids": "ID", "name": "NAME", "names": "NAME"}
    shown |= {"flags": "", "one": "A.json", "other": "B.json"}
    for name in inspect.signature(function).parameters:  # type: ignore[arg-type]
        assert shown.get(name, f"--{name.replace('_', '-')}") in README, name


def test_every_command_is_named() -> None:
    for command in app.registered_commands:
        assert command.callback is not None
        assert f"`{command.name or command.callback.__name__}" in README
    groups = (("engines", engines_app), ("models", models_app), ("jobs", jobs_app), ("bench", bench_app))
    for name, group in groups:
        for command in group.registered_commands:
            shown = command.hidden or re.search(rf"`{name} [\w|\\]*{command.name}", README)
            assert shown, command.name


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert target.startswith("https://") or (ROOT / target).exists(), target
