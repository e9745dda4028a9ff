"""Rules of the tree: allowed imports, and modules that must not import torch."""

import ast
import json
import re
import subprocess
import sys
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RUNTIME = ROOT / "runtime"
MODULES = sorted(RUNTIME.rglob("*.py"))

# A package may import packages of a lower rank, and itself.
RANKS = {
    "core": 0,
    "machine": 1,
    "upstream": 1,
    "video": 1,
    "models": 2,
    "planner": 3,
    "engines": 4,
    "execution": 5,
    "families": 6,
    "pipeline": 7,
    "queue": 8,
    "server": 9,
    "bench": 9,
    "cli": 10,
    "ui": 10,
}
# The command line starts the web app; no other package imports one of its rank.
CROSSINGS = {("runtime/cli/main.py", "runtime.ui.app")}
WITHOUT_TORCH = (
    "runtime.core.progress",
    "runtime.core.settings",
    "runtime.models.catalogue",
    "runtime.engines.service",
    "runtime.engines.store",
    "runtime.planner.resolve",
    "runtime.planner.requirements",
    "runtime.models.hub.download",
    "runtime.machine.doctor",
    "runtime.planner.constraints",
    "runtime.planner.choice.engine_offers",
    "runtime.engines.builders.inductor",
    "runtime.engines.builders.onnxruntime",
    "runtime.engines.builders.tensorrt",
    "runtime.engines.builders.tensorrt_rtx",
    "runtime.engines.builders.torch_tensorrt",
    "runtime.queue.recovery",
    "runtime.queue.job_queue",
    "runtime.queue.enhancing",
    "runtime.queue.model_tasks",
    "runtime.server.serve",
    "runtime.bench.configurations",
    "runtime.bench.statistics",
    "runtime.bench.render",
    "runtime.cli.main",
    "runtime.cli.plan_and_doctor",
    "runtime.cli.models",
)
HEAVY = {"torch", "tensorrt", "tensorrt_rtx_bindings", "gradio"}
# Imports each module in turn and prints the heavy ones that each has added.
IMPORTS = """
import importlib, json, sys
modules, heavy = json.loads(sys.argv[1])
added = {}
for module in modules:
    before = set(heavy) & set(sys.modules)
    importlib.import_module(module)
    added[module] = sorted(set(heavy) & set(sys.modules) - before)
print(json.dumps(added))
"""


@cache
def tree(path: Path) -> ast.Module:
    """Return the parsed code of a file."""
    return ast.parse(path.read_text(encoding="utf-8"))


def imports(path: Path) -> set[str]:
    """Return the full names of the modules that a file imports, at any depth."""
    found = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            found.add(node.module or "")
            found |= {f"{node.module}.{alias.name}" for alias in node.names if node.module in {"runtime"}}
    return found


def imported_modules(path: Path, modules: set[str]) -> set[str]:
    """Return those among `modules` that a file imports or whose names it imports, at any depth."""
    nodes = [node for node in ast.walk(tree(path)) if isinstance(node, ast.ImportFrom)]
    pairs = {(f"{node.module}.{alias.name}", node.module or "") for node in nodes for alias in node.names}
    return {name if name in modules else module for name, module in pairs} & modules


def package(path: Path) -> str | None:
    """Return the package under `runtime` that a file belongs to."""
    parts = path.relative_to(RUNTIME).parts
    return parts[0] if len(parts) > 1 else None


def is_allowed(path: Path, module: str) -> bool:
    """Return whether a file may import a module."""
    own = package(path)
    name = path.relative_to(ROOT).as_posix()
    top, _, rest = module.partition(".")
    if top in {"app", "bench", "tests", "tools"}:
        return False
    if top == "gradio":
        return own == "ui" or name == "runtime/upstream/gradio.py"
    if top == "ray":
        return name.startswith("runtime/server/cluster/")
    if top in {"mcp", "mcp_types"}:
        return name.startswith("runtime/server/mcp/")
    if top.startswith("tensorrt"):
        return own == "engines"
    other = rest.partition(".")[0]
    if top == "runtime" and own is not None and other in RANKS and other != own:
        return RANKS[other] < RANKS[own] or (name, module) in CROSSINGS
    return True


def test_imports_point_one_way() -> None:
    assert len(MODULES) > 300
    refused = [(str(path), module) for path in MODULES for module in imports(path) if not is_allowed(path, module)]
    assert refused == []


def test_modules_do_not_import_each_other_in_circles() -> None:
    modules = {path.relative_to(ROOT).with_suffix("").as_posix().replace("/", "."): path for path in MODULES}
    modules = {name.removesuffix(".__init__"): path for name, path in modules.items()}
    graph = {name: imported_modules(path, set(modules)) - {name} for name, path in modules.items()}
    assert sum(map(len, graph.values())) > len(graph)
    TopologicalSorter(graph).prepare()  # raises a CycleError that has the modules of a circle


@pytest.mark.parametrize(
    ("path", "module"),
    [
        ("core/facts.py", "runtime.machine.probe"),
        ("planner/resolve.py", "runtime.engines.store"),
        ("queue/store.py", "tests.plans"),
        ("queue/store.py", "gradio"),
        ("server/serve.py", "ray"),
        ("planner/resolve.py", "tensorrt_rtx"),
        ("ui/app.py", "runtime.cli.main"),
    ],
)
def test_other_imports_are_found(path: str, module: str) -> None:
    assert not is_allowed(RUNTIME / path, module)


def test_only_tests_of_benchmarks_import_them() -> None:
    importing = re.compile(r"^ *(from|import) bench\b", re.MULTILINE)
    tests = ROOT / "tests"
    folders = {path.parent for path in tests.rglob("*.py") if importing.search(path.read_text(encoding="utf-8"))}
    assert folders == {tests / "bench"}


def test_every_package_has_a_rank() -> None:
    assert {package(path) for path in MODULES} - {None} <= set(RANKS)


def test_planning_imports_no_torch() -> None:
    command = [sys.executable, "-c", IMPORTS, json.dumps([WITHOUT_TORCH, sorted(HEAVY)])]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    assert json.loads(done.stdout) == {module: [] for module in WITHOUT_TORCH}


def test_every_module_has_a_docstring() -> None:
    assert [str(path) for path in MODULES if not ast.get_docstring(tree(path))] == []


def test_app_is_only_an_entry_point() -> None:
    assert imports(ROOT / "app.py") == {"sys", "pathlib", "runtime.cli"}
    assert len(tree(ROOT / "app.py").body) == 6  # docstring, three imports, the folder of `runtime`, call
