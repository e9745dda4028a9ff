"""Measure what the tests protect: plant faults at random places and count those that a test notices.

    python -m tools.plant_faults FOLDER [--seed 1] [--count 100] [--jobs 2] [--default]

Three steps, each kept in FOLDER, so that a stopped run resumes and the same faults can be planted again later:

1. `faults.json`: an equal number of places of each package in `PACKAGES`, chosen by the seed. Copy the file to another
   folder to plant the same faults after the code or the tests have changed; lines that are gone are replaced.
2. `reached/`, `tests.jsonl`: one run of all tests (`--all`), or of those without it (`--default`), on a copy in which
   each place reports the test that reaches it, also from child processes. A place outside functions runs at import:
   every test that calls a function of its module counts as reaching it.
3. `results.jsonl`: each fault is planted in a copy, and the tests that reach it are run until one fails: those of the
   mirrored folder first, then the shortest, for at most `SECONDS`. Tests that failed without a fault are left out.

Prints each fault that no test noticed, then a table by package. Linux and macOS only: processes are forked from one
that has imported the libraries.
"""

import argparse
import ast
import contextlib
import importlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("queue", "engines", "planner", "pipeline", "models", "server", "execution")
SECONDS = 150  # for the tests of one fault
TEST_SECONDS = 100  # for one test: a fault may make it wait for ever
LIBRARIES = (
    "torch",
    "torch.export",
    "diffusers",
    "transformers",
    "gradio",
    "openai",
    "PIL.Image",
    "pytest",
)

# Appended to runtime/ of the copy that records; {log} is filled in. Child processes inherit the name of the test.
_PROBE = """
import os
_seen, _file = set(), []
def hit(number):
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" (")[0]
    if (number, test) not in _seen:
        _seen.add((number, test))
        with open(os.path.join({log!r}, str(os.getpid())), "a", encoding="utf-8") as file:
            file.write(f"{{number}}\\t{{test}}\\n")
"""
# A plugin of pytest in the same run: outcome and duration of each test.
_PLUGIN = """
import json, os
def pytest_runtest_logreport(report):
    if "PYTEST_XDIST_WORKER" not in os.environ:
        with open({log!r}, "a", encoding="utf-8") as file:
            file.write(json.dumps([report.nodeid, report.outcome, report.duration]) + "\\n")
"""


@dataclass(frozen=True)
class Fault:
    """One change of one place: characters `start` to `end` of `path` become `new`; `context` is their lines."""

    path: str
    package: str
    kind: str
    line: int
    start: int
    end: int
    old: str
    new: str
    context: str
    is_statement: bool
    function_starts: tuple[int, ...]
    """Where to probe instead, for places that run at import: the first statement of each function of the module."""

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.kind}: {_one_line(self.old)} -> {_one_line(self.new)}"


def _one_line(text: str) -> str:
    joined = " ".join(text.split())
    return joined if len(joined) <= 70 else f"{joined[:67]}..."


# Choosing places.

_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip


class _Finder(ast.NodeVisitor):
    """Collect the possible faults of one module, as (kind, node, new source, at import)."""

    def __init__(self) -> None:
        self.found: list[tuple[str, ast.expr | ast.stmt, str, bool]] = []
        self.function_starts: list[ast.stmt] = []
        self._depth = 0

    def _add(self, kind: str, node: ast.expr | ast.stmt, new: ast.expr | None) -> None:
        self.found.append((kind, node, f"({ast.unparse(new)})" if new else "pass", not self._depth))

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        for default in (*node.args.defaults, *filter(None, node.args.kw_defaults)):
            self.visit(default)  # not the annotations
        body = node.body[1:] if ast.get_docstring(node) is not None else node.body
        self.function_starts += body[:1]
        self._depth += 1
        for statement in body:
            self.visit(statement)
        self._depth -= 1

    visit_AsyncFunctionDef = visit_FunctionDef  # noqa: N815

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self._depth += 1
        self.visit(node.body)
        self._depth -= 1

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value:
            self.visit(node.value)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Leave text alone: before Python 3.12 its parts have no positions."""

    def visit_If(self, node: ast.If) -> None:
        if not (isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"):
            self.generic_visit(node)

    def visit_match_case(self, node: ast.match_case) -> None:
        for part in (*filter(None, [node.guard]), *node.body):  # a pattern is no expression
            self.visit(part)

    def visit_Compare(self, node: ast.Compare) -> None:
        self.generic_visit(node)
        changed = _COMPARISONS[type(node.ops[0])]()
        self._add("comparison", node, ast.Compare(node.left, [changed, *node.ops[1:]], node.comparators))

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        self.generic_visit(node)
        changed = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        self._add("comparison", node, ast.BoolOp(changed, node.values))

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        self.generic_visit(node)
        if isinstance(node.op, ast.Not):
            self._add("comparison", node, node.operand)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self._add("constant", node, ast.Constant(not node.value))
        elif isinstance(node.value, int | float):
            self._add("constant", node, ast.Constant(node.value + 1))

    def visit_Expr(self, node: ast.Expr) -> None:
        self.generic_visit(node)
        if isinstance(node.value, ast.Call | ast.Await):
            self._add("dropped statement", node, None)

    def visit_Assign(self, node: ast.Assign) -> None:
        self.generic_visit(node)
        if all(isinstance(target, ast.Attribute | ast.Subscript) for target in node.targets):
            self._add("dropped statement", node, None)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self.generic_visit(node)
        self._add("dropped statement", node, None)

    def visit_Raise(self, node: ast.Raise) -> None:
        self.generic_visit(node)
        self._add("removed raise", node, None)

    def visit_Call(self, node: ast.Call) -> None:
        self.generic_visit(node)
        first, *rest = node.args or [ast.Constant(None)]
        if rest and not any(isinstance(argument, ast.Starred) for argument in (first, rest[0])):
            self._add("swapped arguments", node, ast.Call(node.func, [rest[0], first, *rest[1:]], node.keywords))


def faults_of(path: Path, package: str) -> list[Fault]:
    """Return all faults that can be planted in the module `path` of the repository."""
    source = path.read_text(encoding="utf-8")
    lines = source.splitlines(keepends=True)
    begins = [0]
    for line in lines:
        begins.append(begins[-1] + len(line))

    def position(line: int, column: int) -> int:  # ast counts bytes of UTF-8
        return begins[line - 1] + len(lines[line - 1].encode()[:column].decode())

    finder = _Finder()
    finder.visit(ast.parse(source))
    starts = tuple(
        position(statement.lineno, statement.col_offset)
        for statement in finder.function_starts
        if not getattr(statement, "decorator_list", None)
    )
    faults = []
    for kind, node, new, at_import in finder.found:
        start = position(node.lineno, node.col_offset)
        end = position(node.end_lineno or 0, node.end_col_offset or 0)
        old, is_statement = source[start:end], isinstance(node, ast.stmt)
        probes = starts if at_import else ()
        name = path.relative_to(ROOT).as_posix()
        context = "".join(lines[node.lineno - 1 : node.end_lineno])
        faults.append(Fault(name, package, kind, node.lineno, start, end, old, new, context, is_statement, probes))
    return faults


def choose(seed: int, count: int) -> list[Fault]:
    """Return `count` faults, as many of each package and, within it, of each kind as there are, by `seed`."""
    chosen = []
    for index, package in enumerate(PACKAGES):
        share = count * (index + 1) // len(PACKAGES) - count * index // len(PACKAGES)
        generator = random.Random(f"{seed} {package}")
        kinds: dict[str, list[Fault]] = {}
        for path in sorted((ROOT / "runtime" / package).rglob("*.py")):
            for fault in faults_of(path, package):
                kinds.setdefault(fault.kind, []).append(fault)
        for faults in kinds.values():
            generator.shuffle(faults)
        names = sorted(kinds)
        chosen += [kinds[names[number % len(names)]].pop() for number in range(share)]
    return chosen


def located(faults: list[Fault], seed: int) -> list[Fault]:
    """Return faults at the places where their lines are now, also in other files of their packages.

    Lines that have changed or gone are replaced by others of the same package and kind, chosen by `seed`.
    """
    here: dict[str, list[Fault]] = {
        package: [
            fault for path in sorted((ROOT / "runtime" / package).rglob("*.py")) for fault in faults_of(path, package)
        ]
        for package in PACKAGES
    }
    found: list[Fault | None] = []
    for fault in faults:
        same = [
            other
            for other in here[fault.package]
            if (other.kind, other.old, other.context) == (fault.kind, fault.old, fault.context)
        ]
        found.append(
            min(same, key=lambda other: (other.path != fault.path, abs(other.start - fault.start)), default=None)
        )
    generator = random.Random(f"{seed} replaced")
    places = {(fault.path, fault.start) for fault in found if fault is not None}
    for number, fault in enumerate(faults):
        if found[number] is None:
            others = [other for other in here[fault.package] if (other.path, other.start) not in places]
            instead = generator.choice([other for other in others if other.kind == fault.kind])
            places.add((instead.path, instead.start))
            sys.stdout.write(f"changed since it was chosen: {fault}; instead: {instead}\n")
            found[number] = instead
    return [fault for fault in found if fault is not None]


# Copies of the repository.


def copy_tree(folder: Path) -> None:
    """Copy what git tracks, with uncommitted changes, to `folder`."""
    shutil.rmtree(folder, ignore_errors=True)
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    for name in listed.stdout.decode().split("\0"):
        if name and (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    subprocess.run(["git", "init", "--quiet", folder], check=True)  # some tests ask git which files there are
    subprocess.run(["git", "-C", folder, "add", "--all"], check=True)


def write_source(path: Path, source: str) -> None:
    """Replace a module and its bytecode, which Python would take for current within the same second."""
    path.write_text(source, encoding="utf-8")
    for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
        compiled.unlink()


@contextlib.contextmanager
def planted(tree: Path, fault: Fault) -> Iterator[None]:
    """Plant `fault` in `tree` for the time of the `with`."""
    path = tree / fault.path
    source = path.read_text(encoding="utf-8")
    write_source(path, source[: fault.start] + fault.new + source[fault.end :])
    try:
        yield
    finally:
        write_source(path, source)


# Which tests reach which place.


def record(folder: Path, faults: list[Fault], jobs: int, *, everything: bool) -> None:
    """Run the tests on a copy whose places report the tests that reach them."""
    tree, log = folder / "tree", folder / "reached"
    log.mkdir()
    copy_tree(tree)
    probes: dict[str, dict[int, list[int]]] = {}
    for number, fault in enumerate(faults):
        for start in fault.function_starts or (fault.start,):
            probes.setdefault(fault.path, {}).setdefault(start, []).append(number)
    for name, places in probes.items():
        source = (tree / name).read_text(encoding="utf-8")
        expressions = {fault.start: fault.end for fault in faults if fault.path == name and not fault.is_statement}
        edits = []  # (position, text)
        for start, numbers in places.items():
            calls = [f"__import__('runtime.fault_probe').fault_probe.hit({number})" for number in numbers]
            indent = source[source.rfind("\n", 0, start) + 1 : start]
            if start in expressions:
                edits += [(start, f"({' or '.join(calls)} or "), (expressions[start], ")")]
            else:
                edits.append((start, "; ".join(calls) + (f"\n{indent}" if indent.isspace() else "; ")))
        for position, text in sorted(edits, reverse=True):
            source = source[:position] + text + source[position:]
        compile(source, name, "exec")
        write_source(tree / name, source)
    (tree / "runtime" / "fault_probe.py").write_text(_PROBE.format(log=str(log)), encoding="utf-8")
    (tree / "fault_plugin.py").write_text(_PLUGIN.format(log=str(folder / "tests.partial")), encoding="utf-8")
    command = [
        sys.executable,
        "-m",
        "pytest",
        *(["--all"] if everything else []),
        f"--numprocesses={jobs}",
        "--dist=worksteal",
        "-p",
        "fault_plugin",
    ]
    with (folder / "record.log").open("w") as output:
        subprocess.run([*command, "-q"], cwd=tree, stdout=output, stderr=subprocess.STDOUT, check=False)
    (folder / "tests.partial").replace(folder / "tests.jsonl")
    shutil.rmtree(tree)


def tests_of(folder: Path, faults: list[Fault]) -> list[list[str]]:
    """Return the tests that reach each fault, in the order to run them, without those that fail anyway."""
    seconds: dict[str, float] = {}
    passed: set[str] = set()
    failed: set[str] = set()
    for line in (folder / "tests.jsonl").read_text(encoding="utf-8").splitlines():
        test, outcome, duration = json.loads(line)
        seconds[test] = seconds.get(test, 0) + duration
        (passed if outcome == "passed" else failed).add(test)
    reached: list[set[str]] = [set() for _ in faults]
    for file in (folder / "reached").iterdir():
        for line in file.read_text(encoding="utf-8").splitlines():
            number, _, test = line.partition("\t")
            reached[int(number)].add(test)

    def order(fault: Fault, test: str) -> tuple[int, float]:
        name = Path(fault.path).stem
        file = test.partition("::")[0]
        near = 0 if name in file else 1 if f"/{fault.package}/" in file else 2
        return near, seconds[test]

    return [
        sorted((reached_by & passed) - failed, key=lambda test: order(fault, test))
        for fault, reached_by in zip(faults, reached, strict=True)
    ]


# Planting.


def run_tests(tree: Path, tests: list[str], log: Path) -> None:
    """Run `tests` in `tree` until one fails. Called in a forked process, which ends with pytest's exit code."""
    os.setsid()
    os.chdir(tree)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.path[:] = [str(tree), *(path for path in sys.path if path not in ("", str(ROOT)))]
    for name in [name for name in sys.modules if name.partition(".")[0] in ("tools", "runtime", "tests")]:
        del sys.modules[name]
    import pytest

    options = ["--all", "-x", "-q", "--no-header", "--tb=short", "-p", "no:cacheprovider"]
    options += ["-o", f"timeout={TEST_SECONDS}"]
    options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # of pytest plugins that libraries have imported
    code = 3
    try:
        code = pytest.main([*options, f"--basetemp={log.parent / f'{tree.name}-temporary'}", *tests])
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def first_failure(log: Path) -> str:
    """Return the line of pytest's summary that names the failed test, or an empty string."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return next((line for line in lines if line.startswith(("FAILED ", "ERROR "))), "")


def plant(folder: Path, faults: list[Fault], jobs: int) -> None:
    """Plant each fault that has no result yet, and write the results."""
    results = folder / "results.jsonl"
    done = {json.loads(line)["number"] for line in results.read_text().splitlines()} if results.exists() else set()
    waiting = [number for number in range(len(faults)) if number not in done]
    tests = tests_of(folder, faults)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for library in LIBRARIES:
            importlib.import_module(library)
    trees = [folder / f"tree-{slot}" for slot in range(jobs)]
    for tree in trees:
        copy_tree(tree)
    running: dict[int, tuple[int, Path, float, contextlib.ExitStack]] = {}  # process -> fault, tree, start, planted

    def finish(process: int, outcome: str) -> None:
        number, tree, started, stack = running.pop(process)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process, signal.SIGKILL)  # servers and workers that the tests have left
        stack.close()
        trees.append(tree)
        write(number, outcome, first_failure(folder / f"{number}.log"), time.monotonic() - started)

    def write(number: int, outcome: str, by: str = "", seconds: float = 0) -> None:
        with results.open("a", encoding="utf-8") as file:
            row = {"number": number, "outcome": outcome, "by": by, "seconds": round(seconds, 1)}
            file.write(json.dumps(row | {"tests": len(tests[number]), "fault": str(faults[number])}) + "\n")
        sys.stderr.write(f"{len(done) + 1}/{len(faults)} {outcome}: {faults[number]}\n")
        done.add(number)

    while waiting or running:
        while waiting and trees:
            number = waiting.pop(0)
            if not tests[number]:
                write(number, "not reached")
                continue
            tree, stack = trees.pop(), contextlib.ExitStack()
            stack.enter_context(planted(tree, faults[number]))
            process = os.fork()
            if not process:
                run_tests(tree, tests[number], folder / f"{number}.log")
            running[process] = (number, tree, time.monotonic(), stack)
        for process, (_, _, started, _) in list(running.items()):
            ended, status = os.waitpid(process, os.WNOHANG)
            if ended:
                code = os.waitstatus_to_exitcode(status)
                finish(process, {0: "missed", 1: "found", 2: "found"}.get(code, "not run"))
            elif time.monotonic() - started > SECONDS:
                os.killpg(process, signal.SIGKILL)
                os.waitpid(process, 0)
                finish(process, "missed")
        time.sleep(0.1)
    for tree in trees:
        shutil.rmtree(tree)


def report(folder: Path, faults: list[Fault]) -> str:
    """Return the faults that no test noticed, and a table by package."""
    rows = [json.loads(line) for line in (folder / "results.jsonl").read_text(encoding="utf-8").splitlines()]
    lines = [f"{row['outcome']}: {row['fault']}" for row in rows if row["outcome"] != "found"]
    lines += [
        "",
        "| package | planted | found | missed | not reached | not run |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for package in (*PACKAGES, "all"):
        outcomes = [row["outcome"] for row in rows if package in (faults[row["number"]].package, "all")]
        counts = [outcomes.count(outcome) for outcome in ("found", "missed", "not reached", "not run")]
        lines.append(f"| {package} | {len(outcomes)} | {' | '.join(map(str, counts))} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.plant_faults", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="where faults, recordings and results are kept")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=100, help="number of faults (default: 100)")
    parser.add_argument("--default", action="store_true", help="record the tests that run without --all")
    parser.add_argument("--jobs", type=int, default=2, help="processes that run tests at the same time (default: 2)")
    arguments = parser.parse_args()
    folder = arguments.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    chosen = folder / "faults.json"
    if not chosen.exists():
        faults = choose(arguments.seed, arguments.count)
        chosen.write_text(json.dumps([asdict(fault) for fault in faults], indent=1), encoding="utf-8")
    stored = json.loads(chosen.read_text(encoding="utf-8"))
    faults = [Fault(**fault | {"function_starts": tuple(fault["function_starts"])}) for fault in stored]
    faults = located(faults, arguments.seed)
    if not (folder / "tests.jsonl").exists():
        shutil.rmtree(folder / "reached", ignore_errors=True)
        record(folder, faults, arguments.jobs, everything=not arguments.default)
    plant(folder, faults, arguments.jobs)
    sys.stdout.write(report(folder, faults) + "\n")


if __name__ == "__main__":
    main()
