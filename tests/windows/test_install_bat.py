"""install.bat from end to end, with real virtual environments and a real pip, on tiny packages from a folder."""

import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.install.conftest import Repo, make_repo, report
from tests.windows.conftest import WINE, Check

# The base of the virtual environment that runs the tests.
BASE = Path(sys.base_prefix)
SYSTEM = str(Path(os.environ["SYSTEMROOT"]) / "system32") if sys.platform == "win32" else ""
# The variables that remain: those that Windows itself needs. None names a Python.
KEPT = ("SYSTEMROOT", "SYSTEMDRIVE", "COMSPEC", "TEMP", "TMP", "USERPROFILE", "APPDATA", "LOCALAPPDATA", "WINEPREFIX")

FOLDERS = (
    "with blanks",
    "ünïcode",
    "bang!",
    "a&b",
    "(x86)",
    "it's",
    "caret^",
    "comma,",
    "equal=sign",
    "红船",
)
PROMPTS = (
    ("blanks", '"a red boat"', ["a red boat"]),
    ("an empty word", '""', [""]),
    ("an apostrophe", '"a child\'s kite"', ["a child's kite"]),
    ("quotes, as cmd wants them", r'"a \"red\" boat"', ['a "red" boat']),
    ("a caret in quotes", '"q^u"', ["q^u"]),
    ("an exclamation mark", '"a boat!"', ["a boat!"]),
    ("an ampersand", '"cats & dogs"', ["cats & dogs"]),
    ("parentheses, < and >", '"(a) <b> c|d"', ["(a) <b> c|d"]),
    ("other scripts", '"ünï 红船"', ["ünï 红船"]),
    ("an option", "--steps=4 --seed 7", ["--steps=4", "--seed", "7"]),
    ("more than nine words", "1 2 3 4 5 6 7 8 9 10 11", [str(number) for number in range(1, 12)]),
)


def cmd(repo: Repo, line: str, cwd: Path | None = None, **environment: str) -> "subprocess.CompletedProcess[str]":
    """Run a line as it is typed in cmd."""
    return subprocess.run(
        f'cmd /d /s /c "{line}"',
        stdin=subprocess.DEVNULL,
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        env=repo.environment | environment,
        cwd=cwd or repo.root,
        check=False,
        timeout=240,
    )


def outcome(done: "subprocess.CompletedProcess[str]") -> object:
    """Return the arguments that reached the program, or the exit code and the last line of the messages."""
    if done.returncode == 0:
        try:
            arguments = report(done)["arguments"]
            assert isinstance(arguments, list)
            return [bytes.fromhex(argument).decode() for argument in arguments]
        except ValueError:
            return done.stdout
    return done.returncode, (done.stderr.strip().splitlines() or [""])[-1]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Repo:
    """Return a repository that was set up with the Python named in TANDEM_PYTHON."""
    base = tmp_path_factory.mktemp("w")
    repo = make_repo(base, {name: os.environ[name] for name in KEPT if name in os.environ} | {"PATH": SYSTEM})
    done = cmd(repo, "install.bat first", TANDEM_PYTHON=str(BASE / "python.exe"))
    assert done.returncode == 0, done.stderr
    assert "installing PyTorch 2.13.0: the default package" in done.stderr
    return repo


def moved(made: Repo, folder: Path) -> Repo:
    """Copy the repository without its .venv, which no other folder can use."""
    shutil.copytree(made.root, folder, ignore=shutil.ignore_patterns(".venv"))
    return replace(made, root=folder)


def shim(folder: Path, name: str, script: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_bytes(f"@echo off\r\n{script}\r\n".encode())


def test_prompts_and_options_reach_the_program(made: Repo, check: Check) -> None:
    for name, typed, expected in PROMPTS:
        check(f"install.bat, {name}: {typed}", expected, outcome(cmd(made, f"install.bat {typed}")))
    assert outcome(cmd(made, "install.bat")) == []


def test_exit_codes(made: Repo, check: Check) -> None:
    for code in (0, 1, 2, 130):
        check(f"the program ends with {code}", code, cmd(made, f"install.bat exit {code}").returncode)
    check("standard input", "a prompt\n", made.run("read", stdin="a prompt").stdout)


def test_it_is_started_from_anywhere(made: Repo, tmp_path: Path, check: Check) -> None:
    full = str(made.root / "install.bat")
    check("from another folder", ["x"], outcome(cmd(made, f'"{full}" x', cwd=tmp_path)))
    check("with a relative path", ["x"], outcome(cmd(made, r"..\Tandem\install.bat x")))
    check("without .bat", ["x"], outcome(cmd(made, "install x")))
    check("from the root of the drive", ["x"], outcome(cmd(made, f'"{full}" x', cwd=Path(made.root.anchor))))
    check("the program runs where the user is", str(tmp_path), report(cmd(made, f'"{full}"', cwd=tmp_path))["cwd"])
    check("from system32, as administrator", ["x"], outcome(cmd(made, f'"{full}" x', cwd=Path(SYSTEM))))
    here = made.root.drive
    for drive in [f"{letter}:" for letter in "CDEFZ" if f"{letter}:" != here and Path(f"{letter}:/").exists()]:
        check(f"from drive {drive}", ["x"], outcome(cmd(made, f'"{full}" x', cwd=Path(f"{drive}/"))))
    share = rf"\\localhost\{here[0]}$"
    if Path(share).exists():  # on Windows to an administrator, under Wine because run.sh makes it
        path = share + full[2:]
        check("with a path on a share", ["x"], outcome(cmd(made, f'"{path}" x', cwd=tmp_path)))


def test_messages_name_it_as_it_was_started(made: Repo, tmp_path: Path, check: Check) -> None:
    full = str(made.root / "install.bat")
    check("messages name install.bat", "install.bat", report(cmd(made, "install.bat"))["program"])
    check("messages name its full path", full, report(cmd(made, f'"{full}"', cwd=tmp_path))["program"])


@pytest.mark.parametrize(
    "name", [*FOLDERS, pytest.param("50% off", marks=pytest.mark.skipif(WINE, reason="Wine's cmd drops the %"))]
)
def test_folders(made: Repo, tmp_path: Path, name: str, check: Check) -> None:
    repo = moved(made, tmp_path / name / "Tandem")
    python = str(BASE / "python.exe")
    done = cmd(repo, f'"{repo.root}\\install.bat" "a boat"', cwd=tmp_path, TANDEM_PYTHON=python)
    check(f"set up in a folder named {name}", ["a boat"], outcome(done))
    again = cmd(repo, f'"{repo.root}\\install.bat" x', cwd=tmp_path)
    check(f"started in a folder named {name}, by its own Python", ["x"], outcome(again))


def test_a_folder_that_no_virtual_environment_can_be_in(made: Repo, tmp_path: Path, check: Check) -> None:
    repo = moved(made, tmp_path / "semi;colon" / "Tandem")
    done = cmd(repo, f'"{repo.root}\\install.bat" x', cwd=tmp_path, TANDEM_PYTHON=str(BASE / "python.exe"))
    found = done.returncode, "move Tandem to a folder without ;" in done.stderr, "Traceback" in done.stderr
    check("set up in a folder with ; in its name", (2, True, False), found)


def test_the_choice_of_python(made: Repo, tmp_path: Path, check: Check) -> None:
    repo = moved(made, tmp_path / "Tandem")
    none = (2, "Tandem setup: install Python 3.11 from https://www.python.org/downloads/windows/ and run the same "
            "command again")  # fmt: skip
    unusable = (2, "Tandem setup: set it to one, or unset it to search for one")
    python = str(BASE / "python.exe")
    check("no Python", none, outcome(cmd(repo, "install.bat x")))
    shim(tmp_path / "old", "python.bat", "exit /b 1")
    shim(tmp_path / "store", "python.bat", "exit /b 9009")  # as Windows' link to its store
    wrong = ";".join([str(tmp_path / "old"), str(tmp_path / "store"), SYSTEM])
    check("a Python that is too old, and the store's", none, outcome(cmd(repo, "install.bat x", PATH=wrong)))
    check("two lines on what is wrong", 2, len(cmd(repo, "install.bat x").stderr.strip().splitlines()))
    check("TANDEM_PYTHON that is not there", unusable, outcome(cmd(repo, "install.bat x", TANDEM_PYTHON=r"C:\no.exe")))
    check("TANDEM_PYTHON that is no Python", unusable,
          outcome(cmd(repo, "install.bat x", TANDEM_PYTHON=SYSTEM + r"\reg.exe")))  # fmt: skip
    shim(tmp_path / "shims", "python.bat", f'"{python}" %*\r\nexit /b %ERRORLEVEL%')
    shims = f"{tmp_path / 'shims'};{SYSTEM}"
    check("python.bat, as pyenv makes it", ["a b"], outcome(cmd(repo, 'install.bat "a b"', PATH=shims)))
    check("its exit code", 7, cmd(repo, "install.bat exit 7", PATH=shims).returncode)
    shutil.rmtree(repo.root / ".venv")
    blanks = tmp_path / "a Python (x64)"
    for file in ("python.exe", "python3.dll", "python312.dll", "vcruntime140.dll", "vcruntime140_1.dll"):
        if (BASE / file).exists():
            blanks.mkdir(exist_ok=True)
            shutil.copy(BASE / file, blanks)
    (blanks / "pyvenv.cfg").write_text(f"home = {BASE}\n", "utf-8")
    named = str(blanks / "python.exe")
    check("TANDEM_PYTHON with blanks", ["x"], outcome(cmd(repo, "install.bat x", TANDEM_PYTHON=named)))
    check("TANDEM_PYTHON in quotes", ["x"], outcome(cmd(repo, "install.bat x", TANDEM_PYTHON=f'"{named}"')))
    check("python on PATH", ["x"], outcome(cmd(repo, "install.bat x", PATH=f"{BASE};{SYSTEM}")))


def test_failures_of_pip(made: Repo, tmp_path: Path, check: Check) -> None:
    repo = moved(made, tmp_path / "Tandem")
    python = str(BASE / "python.exe")
    repo.require("tinydep==3.0")
    done = cmd(repo, "install.bat x", TANDEM_PYTHON=python)
    log = f"Tandem setup: run the same command again; if it fails again, read {repo.log}"
    check("a package that is not there", (2, log), outcome(done))
    repo.require("tinydep==2.0")
    check("the next run resumes", ["x"], outcome(cmd(repo, "install.bat x", TANDEM_PYTHON=python)))
    repo.stamp.unlink()
    (repo.root / ".venv/Lib/site-packages/tinydep/__init__.py").unlink()
    done = cmd(repo, "install.bat x", TANDEM_PYTHON=python)
    check("a package with a missing file is installed again", ["x"], outcome(done))
    again = cmd(repo, f'"{repo.root}\\install.bat" test -k x', cwd=tmp_path)
    check("install.bat test", str(repo.root), report(again)["cwd"])
    shutil.rmtree(repo.root / ".venv/Lib/site-packages/pip")
    repo.stamp.unlink()
    done = cmd(repo, "install.bat x", TANDEM_PYTHON=python)
    check("a .venv without pip is made again", ["x"], outcome(done))


@pytest.mark.skipif(WINE, reason="Wine's _locking sets no error number, so that a held lock looks like none")
def test_two_set_ups_at_once_install_once(made: Repo, tmp_path: Path, check: Check) -> None:
    repo = moved(made, tmp_path / "Tandem")
    repo.environment = repo.environment | {"TANDEM_PYTHON": str(BASE / "python.exe")}
    both = [repo.start("x"), repo.start("x")]
    outputs = [process.communicate(timeout=240) for process in both]
    failed = [errors for process, (_, errors) in zip(both, outputs, strict=True) if process.returncode]
    check("two at once: both succeed", [], failed)
    check("two at once: set-ups", 1, sum("ready after" in errors for _, errors in outputs))


def test_ctrl_c_reaches_the_program(made: Repo, check: Check) -> None:
    if sys.platform == "win32":
        import ctypes

        kernel = ctypes.windll.kernel32
        if not kernel.GetConsoleCP():
            pytest.skip("needs a console; run.sh runs this test in a terminal of its own")
        handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            process = subprocess.Popen(
                'cmd /d /s /c "install.bat wait"',
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                text=True,
                env=made.environment,
                cwd=made.root,
            )
            assert process.stdout is not None
            assert process.stdout.readline() == "waiting\n"
            kernel.GenerateConsoleCtrlEvent(signal.CTRL_C_EVENT, 0)  # to all processes of this console
            printed = process.communicate(timeout=60)[0]
        finally:
            signal.signal(signal.SIGINT, handler)
        check("Ctrl-C reaches the program", "the program was interrupted", printed.splitlines()[0])
