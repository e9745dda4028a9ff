"""A repository with the installer only, and tiny packages instead of the real ones."""

import json
import os
import shutil
import signal
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]
SCRIPT = "install.bat" if sys.platform == "win32" else "install.sh"

# Prints its arguments and environment as JSON; "exit N", "read" and "wait" serve single tests.
APP = """
import json, os, sys, time
import tinydep
if sys.argv[1:2] == ["exit"]:
    sys.exit(int(sys.argv[2]))
if sys.argv[1:2] == ["read"]:
    print(sys.stdin.read())
    sys.exit()
if sys.argv[1:2] == ["wait"]:
    try:
        print("waiting", flush=True)
        time.sleep(30)
    except KeyboardInterrupt:
        print("the program was interrupted")
        sys.exit(130)
arguments = [os.fsencode(argument).hex() for argument in sys.argv[1:]]
print(json.dumps({"arguments": arguments, "cwd": os.getcwd(), "prefix": sys.prefix, "tinydep": tinydep.VERSION,
    "program": os.environ.get("TANDEM_PROGRAM")}))
"""
PYTEST = """
import json, os, sys
print(json.dumps({"pytest": sys.argv[1:], "cwd": os.getcwd(), "writes_bytecode": not sys.dont_write_bytecode}))
"""


def make_wheel(folder: Path, name: str, version: str, files: dict[str, str]) -> None:
    info = f"{name}-{version}.dist-info"
    metadata = {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{path},,\n" for path in [*files, *metadata, f"{info}/RECORD"])
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        for path, text in {**files, **metadata, f"{info}/RECORD": record}.items():
            wheel.writestr(path, text)


@dataclass
class Repo:
    """A copy of the installer and its environment variables."""

    root: Path
    environment: dict[str, str]
    python: Path = field(init=False)
    stamp: Path = field(init=False)
    log: Path = field(init=False)

    def __post_init__(self) -> None:
        self.python = self.root / (".venv/Scripts/python.exe" if sys.platform == "win32" else ".venv/bin/python")
        self.stamp = self.root / ".venv/tandem-install.json"
        self.log = self.root / ".venv/install.log"

    @property
    def command(self) -> str:
        return str(self.root / SCRIPT)

    def run(
        self, *args: str | bytes, cwd: Path | None = None, stdin: str = "", **environment: str
    ) -> subprocess.CompletedProcess[str]:
        """Run the installer."""
        return subprocess.run(
            [self.command, *args],
            input=stdin,
            capture_output=True,
            text=True,
            env=self.environment | environment,
            cwd=cwd or self.root,
            check=False,
            timeout=240,
        )

    def start(self, *args: str) -> "subprocess.Popen[str]":
        # Of a command in the background of a shell, all processes ignore Ctrl-C, unless one of them handles it.
        handler = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            return subprocess.Popen(
                [self.command, *args],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=self.environment,
                cwd=self.root,
            )
        finally:
            signal.signal(signal.SIGINT, handler)

    def require(self, *requirements: str) -> None:
        (self.root / "requirements.txt").write_text("\n".join(["torch>=2.11,<2.14", *requirements]) + "\n", "utf-8")

    def site_packages(self) -> Path:
        return next(self.root.glob(".venv/lib/python3*/site-packages"))


def report(done: "subprocess.CompletedProcess[str]") -> dict[str, object]:
    """Return the JSON that the program in the copy printed."""
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert isinstance(answer, dict)
    return answer


def path_of(folder: Path, commands: Sequence[str]) -> str:
    """Create a folder for use as PATH with these commands, and without Python."""
    folder.mkdir()
    for name in commands:
        found = shutil.which(name)
        assert found, name
        (folder / name).symlink_to(found)
    return str(folder)


def link_or_copy(source: str, target: str) -> None:
    """Copy a file; installed ones as hard links, which is fast. Tests replace them and never write to them."""
    if "/site-packages/" in source:
        os.link(source, target)
    else:
        shutil.copy2(source, target)


def make_repo(base: Path, environment: dict[str, str]) -> Repo:
    """Return a repository whose installer was not run yet. `environment` is complete but for pip's variables."""
    wheels = base / "wheels"
    wheels.mkdir()
    make_wheel(wheels, "torch", "2.13.0+cpu", {"torch/__init__.py": ""})
    parts = {"tinydep/__init__.py": "from tinydep.part import VERSION", "tinydep/part.py": "VERSION = 1"}
    make_wheel(wheels, "tinydep", "1.0", parts)
    make_wheel(wheels, "tinydep", "2.0", {"tinydep/__init__.py": "VERSION = 2"})
    make_wheel(wheels, "pytest", "9.0", {"pytest/__init__.py": "", "pytest/__main__.py": PYTEST})
    pip = {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheels)}
    repo = Repo(base / "a path, ünïcode" / "Tandem", environment | pip)
    (repo.root / "tools").mkdir(parents=True)
    shutil.copy(REPO / SCRIPT, repo.root)
    shutil.copy(REPO / "tools/setup_env.py", repo.root / "tools")
    repo.require("tinydep==1.0")
    (repo.root / "requirements-gpu.txt").write_text("a-package-that-is-not-there==1.0\n", "utf-8")
    (repo.root / "requirements-dev.txt").write_text("pytest==9.0\n", "utf-8")
    (repo.root / "app.py").write_text(APP, "utf-8")
    return repo


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Repo, "subprocess.CompletedProcess[str]"]:
    """Set up a repository from another directory; return it with that run's result. Tests change copies of it."""
    base = tmp_path_factory.mktemp("install")
    path = path_of(base / "bin", ["bash", "env", "dirname", "readlink"])
    (base / "bin" / "python3").symlink_to(Path(sys.executable).resolve())
    repo = make_repo(base, {"PATH": path, "HOME": str(base), "LANG": os.environ.get("LANG", "C.UTF-8")})
    return repo, repo.run("first", cwd=base)


@pytest.fixture
def shared(installed: tuple[Repo, "subprocess.CompletedProcess[str]"]) -> Repo:
    """Return the set-up repository, for tests that do not change it."""
    return installed[0]


@pytest.fixture
def repo(installed: tuple[Repo, "subprocess.CompletedProcess[str]"], tmp_path: Path) -> Repo:
    """Return a copy of the set-up repository that the test may change."""
    root = tmp_path / "a path, ünïcode" / "Tandem"
    shutil.copytree(installed[0].root, root, symlinks=True, copy_function=link_or_copy)
    return Repo(root, dict(installed[0].environment))
