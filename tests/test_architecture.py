"""Rules of the tree: allowed imports, and modules that must not import torch."""

import ast
import re
import subprocess
import sys
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
    "runtime.planner.engine_offers",
    "runtime.engines.builders.inductor",
    "runtime.engines.builders.onnxruntime",
    "runtime.engines.builders.tensorrt",
    "runtime.engines.builders.tensorrt_rtx",
    "runtime.engines.builders.torch_tensorrt",
    "runtime.queue.recovery",
    "runtime.queue.job_queue",
    "runtime.queue.model_tasks",
    "runtime.server.serve",
    "runtime.bench.configurations",
    "runtime.bench.statistics",
    "runtime.bench.render",
    "runtime.cli.main",
    "runtime.cli.plan_and_doctor",
    "runtime.cli.models",
    "runtime.cli.models",
)


def imports(path: Path) -> set[str]:
    """Return the full names of the modules that a file imports, at any depth."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            found.add(node.module or "")
            found |= {f"{node.module}.{alias.name}" for alias in node.names if node.module in {"runtime"}}
    return found


def package(path: Path) -> str | None:
    """Return the package under `runtime` that a file belongs to."""
    parts = path.relative_to(RUNTIME).parts
    return parts[0] if len(parts) > 1 else None


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(RUNTIME)))
def test_imports_point_one_way(path: Path) -> None:
    own = package(path)
    name = path.relative_to(ROOT).as_posix()
    for module in imports(path):
        top, _, rest = module.partition(".")
        assert top not in {"app", "bench", "tests", "tools"}, f"{name} imports {module}"
        if top == "gradio":
            assert own == "ui" or name == "runtime/upstream/gradio.py", f"{name} imports gradio"
        if top == "ray":
            assert name.startswith("runtime/server/cluster/"), f"{name} imports ray"
        if top.startswith("tensorrt"):
            assert own == "engines", f"{name} imports {top}"
        other = rest.partition(".")[0]
        if top == "runtime" and own is not None and other in RANKS and other != own:
            lower = RANKS[other] < RANKS[own]
            assert lower or (name, module) in CROSSINGS, f"{name} imports {module}"


def test_only_tests_of_benchmarks_import_them() -> None:
    importing = re.compile(r"^ *(from|import) bench\b", re.MULTILINE)
    tests = ROOT / "tests"
    folders = {path.parent for path in tests.rglob("*.py") if importing.search(path.read_text(encoding="utf-8"))}
    assert folders == {tests / "bench"}


def test_every_package_has_a_rank() -> None:
    assert {package(path) for path in MODULES} - {None} <= set(RANKS)


@pytest.mark.parametrize("module", WITHOUT_TORCH)
def test_planning_imports_no_torch(module: str) -> None:
    heavy = {"torch", "tensorrt", "tensorrt_rtx_bindings", "gradio"}
    code = f"import sys, {module}; sys.exit(bool({heavy} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(RUNTIME)))
def test_every_module_has_a_docstring(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))


def test_app_is_only_an_entry_point() -> None:
    tree = ast.parse((ROOT / "app.py").read_text(encoding="utf-8"))
    assert imports(ROOT / "app.py") == {"runtime.cli"}
    assert len(tree.body) == 3  # docstring, import, call
