"""The environment of this process: variables that libraries read, garbage collection, and how the user started it."""

import gc
import os
import re
import shlex
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

# Set by the installer: how the user started it; by install.sh quoted for a shell.
_PROGRAM_VARIABLE = "TANDEM_PROGRAM"
_ROOT = Path(__file__).parents[2]
_INSTALLER = "install.bat" if sys.platform == "win32" else "install.sh"

# Seconds to denoise with the shipped model on 2 idle cores: 3.2 with libgomp's default, 3.5 with this value, 4.1
# without spinning. With a shorter clip while another program is busy: more than 11, 2.0 and 1.5.
_SPINS = "1000"

# Python has read these variables when Tandem's code begins: they remove docstrings that libraries read, make warnings
# errors, ask for statements after the end, print each import, or hide the folder of app.py.
_OF_PYTHON = (
    *("PYTHONOPTIMIZE", "PYTHONINSPECT", "PYTHONWARNINGS", "PYTHONDEVMODE", "PYTHONDEBUG", "PYTHONVERBOSE"),
    *("PYTHONPROFILEIMPORTTIME", "PYTHONTRACEMALLOC", "PYTHONASYNCIODEBUG", "PYTHONSAFEPATH", "PYTHONBREAKPOINT"),
)
# cmd splits words at other characters, also at "=", "," and ";".
_PLAIN_IN_CMD = re.compile(r"[\w.:\\/+@-]+")
_SHORT_FLAGS = re.compile(r"-[bBdEhiIOPqRsSuvVx?]+")

_THRESHOLDS = gc.get_threshold()
# New objects until Python searches for unreachable ones. Seconds to import PyTorch and diffusers: 3.3 with the default
# of 700, 2.5 with this value, 2.4 without a search.
_NEW_OBJECTS = 50_000


def restart_without_variables_of_python() -> None:
    """Start this program again if Python was started with variables that disturb it, or without docstrings (-OO).

    The same if it takes bytes of arguments for ASCII, which it does if PYTHONUTF8 and PYTHONCOERCECLOCALE are 0.
    """
    disturbing = [name for name in _OF_PYTHON if os.environ.get(name)]
    # Where the program's own arguments begin, behind Python's.
    start = len(sys.orig_argv) - len(sys.argv) + 1
    flags = [flag.replace("O", "") if _SHORT_FLAGS.fullmatch(flag) else flag for flag in sys.orig_argv[1:start]]
    in_ascii = sys.getfilesystemencoding() == "ascii" and os.environ.get("PYTHONUTF8") != "1"
    if not disturbing and not in_ascii and flags == sys.orig_argv[1:start]:
        return
    if in_ascii:
        os.environ["PYTHONUTF8"] = "1"
    for name in disturbing:
        del os.environ[name]
    command = [sys.executable, *(flag for flag in flags if flag != "-"), *sys.orig_argv[start:]]
    if sys.platform == "win32":
        import subprocess

        sys.exit(subprocess.call(command))
    os.execv(command[0], command)


def limit_thread_spinning() -> None:
    """Make OpenMP threads (libgomp, used by PyTorch on Linux) sleep after a short wait, unless the user set a policy.

    By default they spin for milliseconds. If another program is busy, that takes the cores from the threads that they
    wait for. Call before torch is imported.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", _SPINS)


def collect_garbage_less_often() -> None:
    """Search for unreachable objects less often: imports make half a million objects, of which almost all stay.

    Call in each process before large libraries are imported; see `collect_garbage_as_usual`.
    """
    gc.set_threshold(_NEW_OBJECTS)


def collect_garbage_as_usual() -> None:
    """Search for unreachable objects as often as by default, except among those that exist now.

    Call after the imports in a process that runs for long: unreachable objects may hold tensors.
    """
    gc.freeze()
    gc.set_threshold(*_THRESHOLDS)


def program() -> str:
    """Return how the user started Tandem, for commands to paste: "./install.sh", ".venv/bin/python app.py"."""
    command = _started_by_installer()
    if command:
        return command
    if Path(sys.argv[0]).name == "app.py":
        return " ".join(map(quoted, sys.orig_argv[: len(sys.orig_argv) - len(sys.argv) + 1]))
    return installer()


def installer() -> str:
    """Return the command that starts the installer, for commands to paste."""
    command = _started_by_installer()
    if command:
        return command
    if sys.platform != "win32" and Path.cwd() == _ROOT:
        return f"./{_INSTALLER}"
    return quoted(str(_ROOT / _INSTALLER))


def _started_by_installer() -> str:
    command = os.environ.get(_PROGRAM_VARIABLE, "")
    return quoted(command) if command and sys.platform == "win32" else command


def quoted(word: str) -> str:
    """Return a word of a command as it is typed in a POSIX shell, or in cmd, which knows double quotes only."""
    if sys.platform == "win32":
        return word if _PLAIN_IN_CMD.fullmatch(word) else f'"{word}"'
    return shlex.quote(word)


@contextmanager
def environment_variables(values: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables while the body runs, for this process and its children."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
