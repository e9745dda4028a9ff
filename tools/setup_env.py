"""Set Tandem up in `.venv` and start it. `install.sh` and `install.bat` find a Python and call this.

    setup_env.py [ARGS...]             set up if needed, then run `python app.py ARGS...`
    setup_env.py test [PYTEST ARGS]    set up with the test tools, then run `python -m pytest` in the repository root;
                                       with --all also the tests that tests/conftest.py leaves out by default

Runs on any Python from 3.10 with the standard library only, before anything is installed:

1. The stamp in `.venv` records the requirement files, the GPU and the Python that `.venv` was made for. If nothing
   changed, the program starts at once. The stamp is removed before a change and written last, so an interrupted set-up
   is never mistaken for a finished one.
2. Otherwise, under a lock: make `.venv` (again, if its Python does not run), install the PyTorch build for the machine,
   then the requirement files.
3. If Python may not write bytecode (PYTHONDONTWRITEBYTECODE), compile Tandem after each change of it, because Python
   would compile it at every start. Packages are compiled while they are installed. Tests always write bytecode.

Messages go to standard error; standard input and output belong to the program, which replaces this process (on Windows,
its exit code is returned). Exit codes: 2 for errors, with one line for the problem and one for the fix; 130 for Ctrl-C.
"""

import contextlib
import csv
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")
STAMP = VENV / "tandem-install.json"
LOG = VENV / "install.log"
COMPILED = VENV / "tandem-compiled.json"
LOCK = ROOT / ".install.lock"  # not in .venv, which may be deleted while the lock is held

# Tests often wait for child processes and for the browser: four processes keep two cores busy. Each runs neighbouring
# tests, which share fixtures, and takes over tests of another process when it has none left.
_PARALLEL = ("--numprocesses=3", "--dist=worksteal")
NO_BYTECODE = "PYTHONDONTWRITEBYTECODE"
# Only these of Python's variables reach setting up and the program: others name another Python's modules or folders, or
# end it at once. install.sh drops them before it starts this file.
PYTHON_VARIABLES = (NO_BYTECODE, "PYTHONUNBUFFERED", "PYTHONPYCACHEPREFIX", "PYTHONFAULTHANDLER", "PYTHONNOUSERSITE")
# Of pip's variables, only these: where packages come from. Others would change what is installed where.
PIP_VARIABLES = (
    *("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_NO_INDEX", "PIP_CONFIG_FILE", "PIP_CONSTRAINT"),
    *("PIP_TRUSTED_HOST", "PIP_CERT", "PIP_CLIENT_CERT", "PIP_PROXY", "PIP_KEYRING_PROVIDER", "PIP_CACHE_DIR"),
    *("PIP_TIMEOUT", "PIP_DEFAULT_TIMEOUT", "PIP_RETRIES", "PIP_ONLY_BINARY", "PIP_NO_BINARY", "PIP_PREFER_BINARY"),
)
APP, GPU, DEV = "requirements.txt", "requirements-gpu.txt", "requirements-dev.txt"
TORCH = "2.13.0"
TORCH_RANGE = ((2, 11), (2, 13))  # the same range as in requirements.txt
PYTHON_RANGE = ((3, 10), (3, 13))
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
CUDA_INDEX = "https://download.pytorch.org/whl/cu130"
RTX_CAPABILITIES, FIRST_NEWER_RTX = ("7.5", "8.0", "8.6", "8.9"), 12.0  # compute capabilities
GB = 1_000_000_000
DISK_NEEDED = {"cpu": 3 * GB, "cuda": 18 * GB}
NVIDIA_SMI = ("/usr/lib/wsl/lib/nvidia-smi", r"C:\Windows\System32\nvidia-smi.exe")
# pip's messages if a package index cannot be reached.
NETWORK_WORDS = ("Retrying (", "ConnectionError", "ConnectTimeout", "ReadTimeout", "ProxyError", "Read timed out")


class SetupError(Exception):
    """Set-up cannot continue: what went wrong, and what the user can do about it."""

    def __init__(self, what: str, remedy: str) -> None:
        super().__init__(what)
        self.what = what
        self.remedy = remedy


def say(text: str) -> None:
    sys.stderr.write(f"Tandem setup: {text}\n")
    sys.stderr.flush()


def open_closed_streams() -> None:
    """Open standard streams that the caller has closed: files would take their numbers, and be written to by others."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_RDWR)
            if null != number:
                os.dup2(null, number)
                os.close(null)
            os.set_inheritable(number, True)
            setattr(sys, name, os.fdopen(number, "r" if number == 0 else "w", closefd=False))


def main(args: Sequence[str]) -> int:
    open_closed_streams()
    for name in [name for name in os.environ if name.startswith("PYTHON") and name not in PYTHON_VARIABLES]:
        del os.environ[name]
    testing = list(args[:1]) == ["test"]
    try:
        if not is_current(testing):
            with install_lock():
                if not is_current(testing):  # another set-up may have done it while this one waited
                    install(testing)
        if testing:
            os.chdir(ROOT)
            os.environ.pop(NO_BYTECODE, None)  # hundreds of processes import the same tests
            return start([str(PYTHON), "-m", "pytest", *_PARALLEL, *args[1:]])
        if os.environ.get(NO_BYTECODE):
            compile_sources()
        return start([str(PYTHON), str(ROOT / "app.py"), *args])
    except SetupError as error:
        say(error.what)
        say(error.remedy)
        return 2
    except KeyboardInterrupt:
        say("stopped; run the same command to continue")
        return 130
    except OSError as error:
        say(f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}")
        say(f"check that {ROOT} is writable and has free disk space, then run the same command again")
        return 2


def start(command: list[str]) -> int:
    """Replace this process with the program."""
    if sys.platform != "win32":
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python ignores it, and exec would inherit that
        os.execv(command[0], command)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the program's to answer
    return subprocess.call(command)


# The stamp: what .venv was made for.


def read_stamp() -> dict[str, Any]:
    """Return the stamp, or an empty one if there is none or it cannot be read."""
    try:
        stamp = json.loads(STAMP.read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return stamp if isinstance(stamp, dict) else {}


def write_stamp(stamp: dict[str, Any]) -> None:
    partial = STAMP.with_suffix(".partial")
    partial.write_text(json.dumps(stamp, indent=1), "utf-8")
    partial.replace(STAMP)


def digest(name: str) -> str:
    return hashlib.sha256((ROOT / name).read_bytes()).hexdigest()


def is_current(testing: bool) -> bool:
    """Return whether `.venv` matches the requirement files, the GPU and TANDEM_PYTHON. Takes milliseconds."""
    stamp = read_stamp()
    if not stamp:
        return False
    needed = [APP, *([DEV] if testing else []), *([GPU] if stamp.get("nvidia") else [])]
    files = stamp.get("files", {})
    return (
        all(files.get(name) == digest(name) for name in needed)
        and stamp.get("gpu_evidence") == gpu_evidence()
        and ("TANDEM_PYTHON" not in os.environ or stamp.get("python") == own_version())
        and (os.path.abspath(sys.executable) == str(PYTHON) or venv_version() is not None)  # noqa: PTH100 (resolve would leave .venv)
    )


def own_version() -> str:
    return "{}.{}".format(*sys.version_info)


@contextlib.contextmanager
def install_lock() -> Iterator[None]:
    """Allow one set-up at a time in this folder. The system frees the lock with its holder, so it cannot go stale."""
    with LOCK.open("a") as file:
        os.set_inheritable(file.fileno(), True)  # pip holds it too, so that it counts when this process is killed
        if not try_lock(file.fileno()):
            say("another set-up is running in this folder; waiting for it")
            while not try_lock(file.fileno()):
                time.sleep(0.3)
        yield


def try_lock(fd: int) -> bool:
    try:
        if sys.platform == "win32":
            msvcrt.locking(fd, msvcrt.LK_NBLCK, 1)
        else:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    except OSError:
        say("this file system has no locks; do not start another set-up here before this one has finished")
    return True


def compile_sources() -> None:
    """Compile Tandem for the Python of `.venv` if a file has changed since the last time. Takes milliseconds otherwise.

    A folder that cannot be written is left as it is: Python then compiles at each start.
    """
    files = [ROOT / "app.py", *(ROOT / "runtime").rglob("*.py")]
    now = [read_stamp().get("python"), len(files), max(path.stat().st_mtime_ns for path in files)]
    with contextlib.suppress(OSError, ValueError):
        if json.loads(COMPILED.read_text("utf-8")) == now:
            return
    command = [str(PYTHON), "-I", "-m", "compileall", "-q", str(ROOT / "app.py"), str(ROOT / "runtime")]
    with contextlib.suppress(OSError):
        subprocess.run(command, stdout=subprocess.DEVNULL, check=False)
        COMPILED.write_text(json.dumps(now), "utf-8")


# The machine.


def gpu_evidence() -> str:
    """Return the evidence of an NVIDIA GPU: "driver", the path of an nvidia-smi to ask, or nothing."""
    if sys.platform == "darwin":
        return ""
    if any(Path("/proc/driver/nvidia/gpus").glob("*")) and any(Path("/dev").glob("nvidia[0-9]*")):
        return "driver"
    here = (path for path in NVIDIA_SMI if Path(path).is_file())
    return shutil.which("nvidia-smi") or next(here, "")


def has_nvidia_gpu(evidence: str) -> bool:
    if evidence in ("", "driver"):
        return evidence == "driver"
    try:
        answer = subprocess.run(
            [evidence, "-L"], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=30, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return answer.returncode == 0 and "GPU 0" in answer.stdout


def check_disk(nvidia: bool) -> None:
    needed = GB if installed_torch() else DISK_NEEDED["cuda" if nvidia else "cpu"]
    free = shutil.disk_usage(ROOT).free
    if free < needed:
        raise SetupError(
            f"the disk of {ROOT} has {free / GB:.1f} GB free; installing takes about {needed / GB:.0f} GB",
            "free some space and run the same command again",
        )


# Installing.


def install(testing: bool) -> None:
    if sys.platform == "darwin" and os.uname().machine == "x86_64":
        raise SetupError(
            f"PyTorch {TORCH} is not available for Macs with an Intel processor or for an x86 Python",
            "use a Mac with an Apple processor and a Python for arm64, or another machine",
        )
    began = time.monotonic()
    testing = testing or DEV in read_stamp().get("files", {})  # installed test tools are kept up to date
    evidence = gpu_evidence()
    nvidia = has_nvidia_gpu(evidence)
    check_disk(nvidia)
    prepare_venv()
    LOG.write_text("", "utf-8")
    install_torch(nvidia)
    names = [APP, *([DEV] if testing else [])]
    say(f"installing the packages in {' and '.join(names)}")
    pip("install", *(part for name in names for part in ("-r", str(ROOT / name))), doing="install the packages")
    if nvidia:
        names.append(GPU)
        install_gpu_extras()
    compile_packages()
    write_stamp(
        {
            "files": {name: digest(name) for name in names},
            "python": venv_version(),
            "torch": installed_torch(),
            "nvidia": nvidia,
            "gpu_evidence": evidence,
        }
    )
    say(f"ready after {time.monotonic() - began:.0f} s")


def prepare_venv() -> None:
    """Leave a `.venv` without a stamp whose Python and pip run and whose packages are complete."""
    if os.pathsep in str(VENV):
        raise SetupError(
            f"no virtual environment can be made in a folder with {os.pathsep} in its path: {VENV.parent}",
            f"move Tandem to a folder without {os.pathsep} in its path, and run the same command again",
        )
    base = base_python()  # before .venv, which may lead to it, is deleted
    if VENV.is_symlink() or VENV.exists():
        flaw = venv_flaw()
        if flaw is None:
            finished = STAMP.exists()
            STAMP.unlink(missing_ok=True)
            if not finished:
                drop_half_installed()
            return
        say(f"making .venv again: {flaw}")
        if VENV.is_symlink() or not VENV.is_dir():
            VENV.unlink()
        else:
            shutil.rmtree(VENV)
    say(f"making .venv with Python {own_version()}")
    made = subprocess.run(
        [base, "-I", "-m", "venv", str(VENV)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
    )
    if made.returncode != 0:
        last = (made.stdout.strip().splitlines() or ["no reason given"])[-1]
        raise SetupError(
            f"{base} could not make a virtual environment: {last}",
            "install its venv module (Debian and Ubuntu: the package python3-venv), "
            "or name another Python in TANDEM_PYTHON; then run the same command again",
        )


def base_python() -> str:
    """Return the Python that creates `.venv`: this one, or its base if this one is `.venv`'s."""
    if sys.platform == "win32":
        return str(getattr(sys, "_base_executable", sys.executable))
    return str(Path(sys.executable).resolve())


def venv_flaw() -> str | None:
    """Return why the existing `.venv` cannot be used, or None."""
    version = venv_version()
    if version is None:
        return "its Python does not run"
    if "TANDEM_PYTHON" in os.environ and version != own_version():
        return f"it has Python {version}, and TANDEM_PYTHON is {own_version()}"
    major_minor = tuple(int(part) for part in version.split("."))
    if not PYTHON_RANGE[0] <= major_minor <= PYTHON_RANGE[1]:
        return f"it has Python {version}, which Tandem does not run on"
    if ask_venv("import pip") is None:
        return "its pip does not run"
    return None


def venv_version() -> str | None:
    """Return the version of `.venv`'s Python as "3.11", or None if it does not run or is no virtual environment."""
    return ask_venv("import sys; assert sys.prefix != sys.base_prefix; print('%d.%d' % sys.version_info[:2])")


def ask_venv(code: str) -> str | None:
    try:
        answer = subprocess.run(
            [str(PYTHON), "-I", "-c", code], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
        )
    except OSError:
        return None
    return answer.stdout.strip() if answer.returncode == 0 else None


def site_packages() -> Path:
    if sys.platform == "win32":
        return VENV / "Lib" / "site-packages"
    return next(iter(VENV.glob("lib/python3*/site-packages")), VENV / "lib")


def drop_half_installed() -> None:
    """Remove packages that an interrupted pip left incomplete, so that pip installs them again.

    pip considers a package installed if its `.dist-info` folder exists, which is created before all files are copied.
    RECORD, written last, lists the files.
    """
    for left in site_packages().glob("~*"):
        shutil.rmtree(left, ignore_errors=True)
    for info in site_packages().glob("*.dist-info"):
        record = info / "RECORD"
        try:
            with record.open(encoding="utf-8", newline="") as file:
                listed = [row[0] for row in csv.reader(file) if row and "__pycache__" not in row[0]]
        except OSError:
            listed = ["/missing"]
        if not all((info.parent / name).exists() for name in listed):
            say(f"{info.name.removesuffix('.dist-info')} is incomplete; installing it again")
            shutil.rmtree(info)


# PyTorch: the build that suits the machine.


def installed_torch() -> str | None:
    """Return the version of PyTorch in `.venv` ("2.13.0+cpu"), or None."""
    for info in site_packages().glob("torch-*.dist-info"):
        return info.name.removeprefix("torch-").removesuffix(".dist-info")
    return None


def install_torch(nvidia: bool) -> None:
    there = installed_torch()
    if there and suits(there, nvidia):
        say(f"PyTorch {there} is already there")
        return
    requirement, index, size = choose_torch(nvidia)
    say(f"installing PyTorch {requirement.partition('==')[2].lstrip('=')}: {size}")
    if there:
        pip("uninstall", "--yes", "torch", doing=f"remove PyTorch {there}")
    pip("install", requirement, *index, doing="install PyTorch")


def suits(version: str, nvidia: bool) -> bool:
    """Return whether this PyTorch suits the machine. A CUDA build runs without a GPU; a CPU build cannot use one."""
    match = re.match(r"(\d+)\.(\d+)\.", version)
    if match is None or not TORCH_RANGE[0] <= (int(match[1]), int(match[2])) <= TORCH_RANGE[1]:
        return False
    if not nvidia:
        return True
    return "+cu" in version if sys.platform == "win32" else not version.endswith("+cpu")


def choose_torch(nvidia: bool) -> tuple[str, list[str], str]:
    """Return the requirement for pip, the index options, and a description of the size.

    Without a GPU, a `+cpu` build from the configured index is preferred. On Linux, where the default package contains
    CUDA, PyTorch's index of CPU builds is next, and the default package last.
    """
    if sys.platform == "darwin" or (sys.platform == "win32" and not nvidia):
        return f"torch=={TORCH}", [], "the default package, a CPU build; about 0.2 GB to download"
    cuda = "with CUDA; about 3 GB to download, 8 GB on disk"
    if nvidia and sys.platform != "win32":
        # === instead of ==, which would also match a +cpu build of the configured index.
        return f"torch{'===' if TORCH in torch_versions() else '=='}{TORCH}", [], cuda
    build, index, size = ("+cu", CUDA_INDEX, cuda) if nvidia else ("+cpu", CPU_INDEX, "about 0.2 GB to download")
    here = torch_versions()
    for options in ([], ["--index-url", index]):
        for version in torch_versions(*options) if options else here:
            if version.startswith(TORCH + build):
                return f"torch=={version}", options, size
    if TORCH not in here:
        raise unreachable("PyTorch could not be installed")
    if nvidia:
        say(f"{index} cannot be reached: using the default package, a CPU build, which cannot use the GPU")
        return f"torch=={TORCH}", [], "about 0.2 GB to download"
    say(f"{index} cannot be reached: using the default package, which contains CUDA although no GPU was found")
    check_disk(nvidia=True)
    return f"torch=={TORCH}", [], cuda


def torch_versions(*options: str) -> list[str]:
    """Return the builds of PyTorch that pip finds for this Python; none if it cannot reach an index.

    `pip index` reads the list only. A dry run of an install may download the complete package.
    """
    code, text = run_pip(["index", "versions", "torch", "--timeout", "15", "--retries", "1", *options])
    listed = re.search(r"^Available versions: (.*)$", text, re.MULTILINE)
    return listed[1].split(", ") if code == 0 and listed else []


def install_gpu_extras() -> None:
    """Install each package separately, so that the others are installed if TensorRT is not available."""
    say(f"installing the packages in {GPU}; TensorRT among them is large")
    rtx = has_rtx_gpu()
    for line in (ROOT / GPU).read_text("utf-8").splitlines():
        if not line or line.startswith("#") or (line.startswith("tensorrt-rtx") and not rtx):
            continue
        try:
            pip("install", line, doing=f"install {line.partition('==')[0]}")
        except SetupError as error:
            say(f"continuing without one of the packages in {GPU}: {error.what}")
            say(f'to try it again: "{PYTHON}" -m pip install -r "{ROOT / GPU}"')


def has_rtx_gpu() -> bool:
    """Return whether TensorRT for RTX supports the first GPU; see `tensorrt_rtx_problem` in runtime/machine."""
    answer = ask_venv("import torch; print('%d.%d' % torch.cuda.get_device_capability())")
    return answer is not None and (answer in RTX_CAPABILITIES or float(answer) >= FIRST_NEWER_RTX)


def compile_packages() -> None:
    """Compile the packages on all cores, without their tests; pip would do it on one.

    What no Python can compile is left as it is.
    """
    options = ["-q", "-j", "0", "-x", r"site-packages[/\\].*[/\\]tests[/\\]"]
    command = [str(PYTHON), "-I", "-m", "compileall", *options, str(site_packages())]
    # As pip, it holds the lock.
    subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        close_fds=False,
        check=False,
    )


# pip.


def pip(*args: str, doing: str) -> None:
    """Run pip in `.venv`; see `compile_packages` for the bytecode. Raises SetupError with pip's reason."""
    command, *more = args
    code, text = run_pip(["--no-input", command, *["--no-compile"] * (command == "install"), *more])
    if code == 0:
        return
    if "No space left on device" in text or "not enough space on the disk" in text:
        raise SetupError(
            f"could not {doing}: the disk is full",
            f"free some space and run the same command again; pip's log: {LOG}",
        )
    if any(word in text for word in NETWORK_WORDS):
        raise unreachable(f"could not {doing}")
    reasons = re.findall(r"^ERROR: (.*)$", text, re.MULTILINE) or [f"pip ended with code {code}"]
    raise SetupError(f"could not {doing}: {reasons[0]}", f"run the same command again; if it fails again, read {LOG}")


def unreachable(what: str) -> SetupError:
    return SetupError(
        f"{what}: pip cannot reach the package index",
        f"check the network (or pip's proxy and index settings) and run the same command again; pip's log: {LOG}",
    )


def run_pip(args: list[str]) -> tuple[int, str]:
    """Run pip, log its output, and show the last line on a terminal. Return its exit code and output."""
    scratch = VENV / "tmp"  # pip unpacks gigabytes here, on the checked disk, not in /tmp
    scratch.mkdir(exist_ok=True)
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("PIP_") or (name in PIP_VARIABLES and value)
    }
    captured: list[str] = []
    with (
        LOG.open("a", encoding="utf-8") as log,
        subprocess.Popen(
            [str(PYTHON), "-I", "-u", "-X", "utf8", "-m", "pip", "--disable-pip-version-check", *args],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
            env=kept | dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(scratch)),
            close_fds=False,  # inherits the lock only: Python marks other files as not inheritable
        ) as process,
    ):
        log.write(f"$ pip {' '.join(args)}\n")
        assert process.stdout is not None
        try:
            for line in process.stdout:
                captured.append(line)
                log.write(line)
                show_progress(line)
        except BaseException:
            process.terminate()
            raise
    show_progress("")
    shutil.rmtree(scratch, ignore_errors=True)
    return process.returncode, "".join(captured)


def show_progress(line: str) -> None:
    """Replace the last line on a terminal; an empty line clears it."""
    if sys.stderr.isatty():
        width = max(shutil.get_terminal_size().columns - 4, 10)
        sys.stderr.write(f"\r{line.strip()[:width].ljust(width)}\r")
        sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
