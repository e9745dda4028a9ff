"""Variables of other programs with odd values, and what runs with them."""

import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tests.app_server import MODEL, ROOT, free_port, make_cache
from tests.waiting import until

# A folder in which nothing can be created, a file, and nothing.
NO_FOLDER, FILE, NOTHING = "/proc/none", str(ROOT / "README.md"), "/nonexistent/x"
_UNUSABLE_EVEN_FOR_PYTHON = frozenset(
    {
        *("PYTHONHOME", "PYTHONPATH", "PYTHONHASHSEED", "PYTHONUTF8", "PYTHONMALLOC"),
        *("PYTHONIOENCODING", "PYTHONEXECUTABLE", "PYTHONPLATLIBDIR"),
    }
)
# With these, Python compiles all files of PyTorch and Gradio again in each run: fifteen seconds.
_SLOW = frozenset({"PYTHONPYCACHEPREFIX"})
# What a program needs of the environment.
_UNAVOIDABLE = ("PATH", "SystemRoot")

# Independent of each other: all may be set at once.
TABLE: Mapping[str, str] = {
    # Proxies, certificates and tokens.
    "ALL_PROXY": "socks://127.0.0.1:1080/",
    "HTTPS_PROXY": "socks5://127.0.0.1:1080",
    "HTTP_PROXY": "http://[::1",
    "NO_PROXY": "[::1],fe80::/10,http://[x,é",
    "SSL_CERT_FILE": NOTHING,
    "SSL_CERT_DIR": FILE,
    "SSLKEYLOGFILE": NOTHING,
    "REQUESTS_CA_BUNDLE": NOTHING,
    "HF_TOKEN": "\x01é",
    # Gradio, the web server.
    "GRADIO_DEBUG": "1",
    "GRADIO_TEMP_DIR": NO_FOLDER,
    "GRADIO_EXAMPLES_CACHE": FILE,
    "GRADIO_SERVER_PORT": "x",
    "GRADIO_NUM_PORTS": "",
    "GRADIO_NUM_WORKERS": "x",
    "GRADIO_ROOT_PATH": "http://[",
    "GRADIO_SSR_MODE": "true",
    "GRADIO_HEARTBEAT_INTERVAL": "nan",
    "GRADIO_CACHE_MODE": "x",
    "GRADIO_WATCH_DIRS": NOTHING,
    "GRADIO_DEFAULT_CONCURRENCY_LIMIT": "x",
    "GRADIO_MCP_SERVER": "true",
    "GRADIO_VIBE_MODE": "1",
    "SPACE_ID": "a/b",
    "SYSTEM": "spaces",
    "WEB_CONCURRENCY": "x",
    "FORWARDED_ALLOW_IPS": "x/y",
    "BROWSER": '"%s',
    # Hugging Face.
    "HF_HUB_DOWNLOAD_TIMEOUT": "x",
    "HF_HUB_ETAG_TIMEOUT": "",
    "HF_HOME": NO_FOLDER,
    "XDG_CACHE_HOME": FILE,
    "XDG_CONFIG_HOME": NO_FOLDER,
    "USE_TORCH": "0",
    "DIFFUSERS_ATTN_BACKEND": "x",
    "TRANSFORMERS_VERBOSITY": "x",
    "TOKENIZERS_PARALLELISM": "x",
    "ACCELERATE_USE_FSDP": "x",
    # PyTorch, NumPy, OpenMP, compilers.
    "TORCHINDUCTOR_CACHE_DIR": NO_FOLDER,
    "TORCHINDUCTOR_COMPILE_THREADS": "x",
    "TRITON_CACHE_DIR": FILE,
    "TORCH_LOGS": "x",
    "TORCH_TRACE": NO_FOLDER,
    "TORCH_DISTRIBUTED_DEBUG": "x",
    "PYTORCH_CUDA_ALLOC_CONF": "x",
    "CUDA_VISIBLE_DEVICES": "x",
    "OMP_NUM_THREADS": "x",
    "MKL_NUM_THREADS": "0",
    "NPY_DISABLE_CPU_FEATURES": "SSE SSE2",
    "WORLD_SIZE": "x",
    "MPLBACKEND": "x",
    "MPLCONFIGDIR": NO_FOLDER,
    "PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION": "x",
    "ORT_LOG_LEVEL": "x",
    "TQDM_MININTERVAL": "x",
    "RAY_ADDRESS": "x",
    # The terminal, the system and Python.
    "COLUMNS": "0",
    "TERM": "",
    "LC_ALL": "x_Y.none",
    "TZ": "/x",
    "HOME": NOTHING,
    "TMPDIR": FILE,
    "VIRTUAL_ENV": NOTHING,
    "CONDA_PREFIX": NO_FOLDER,
    "UV_PYTHON": "x",
    "PIP_TARGET": NO_FOLDER,
    "FFREPORT": NO_FOLDER,
    "PYTHONOPTIMIZE": "2",
    "PYTHONINSPECT": "1",
    "PYTHONWARNINGS": "error",
    "PYTHONDEVMODE": "1",
    "PYTHONSAFEPATH": "1",
    "PYTHONSTARTUP": NOTHING,
    "PYTHONPYCACHEPREFIX": NO_FOLDER,
    # Python itself ends for these; the installer drops them.
    "PYTHONHOME": NOTHING,
    "PYTHONHASHSEED": "x",
    "PYTHONUTF8": "x",
    "PYTHONMALLOC": "x",
    "PYTHONEXECUTABLE": NOTHING,
    "PYTHONPLATLIBDIR": "x",
}
# Set one at a time only: they turn others off, are unlikely, or are further values of variables above.
ALONE: Mapping[str, tuple[str, ...]] = {
    # Proxies, certificates and tokens.
    "all_proxy": ("", "direct://"),
    "NO_PROXY": ("*",),
    "CURL_CA_BUNDLE": (NOTHING,),
    "OPENSSL_CONF": (NOTHING, FILE),
    "OPENSSL_MODULES": (NOTHING,),
    # Hugging Face.
    "HF_HOME": ("", FILE),
    "HF_HUB_CACHE": (FILE,),
    "HF_ENDPOINT": ("http://[",),
    "HF_TOKEN_PATH": ("/root",),
    "HF_HUB_ENABLE_HF_TRANSFER": ("1",),
    "HF_HUB_DISABLE_PROGRESS_BARS": ("x",),
    "HF_XET_HIGH_PERFORMANCE": ("x",),
    "HF_MODULES_CACHE": (FILE,),
    "TRANSFORMERS_OFFLINE": ("x",),
    "TRANSFORMERS_CACHE": (FILE,),
    "SAFETENSORS_FAST_GPU": ("1",),
    "XDG_CACHE_HOME": ("", "relative"),
    "XDG_DATA_HOME": (FILE,),
    "XDG_CONFIG_DIRS": (FILE,),
    "XDG_RUNTIME_DIR": (NOTHING,),
    # PyTorch, OpenMP, compilers, drivers.
    "LD_LIBRARY_PATH": (NOTHING, ""),
    "LD_PRELOAD": (NOTHING,),
    "LD_BIND_NOW": ("1",),
    "CUDA_HOME": (NOTHING,),
    "CUDA_PATH": (FILE,),
    "CUDA_VISIBLE_DEVICES": ("", "-1"),
    "CUDA_DEVICE_ORDER": ("x",),
    "CUDA_LAUNCH_BLOCKING": ("x",),
    "CUDA_MODULE_LOADING": ("x",),
    "CUBLAS_WORKSPACE_CONFIG": ("x",),
    "NVIDIA_VISIBLE_DEVICES": ("void",),
    "NVIDIA_TF32_OVERRIDE": ("x",),
    "NCCL_DEBUG": ("x",),
    "PYTORCH_ALLOC_CONF": ("x", "max_split_size_mb:x"),
    "PYTORCH_NO_CUDA_MEMORY_CACHING": ("1",),
    "PYTORCH_NVML_BASED_CUDA_CHECK": ("x",),
    "PYTORCH_ENABLE_MPS_FALLBACK": ("x",),
    "PYTORCH_MPS_HIGH_WATERMARK_RATIO": ("x",),
    "TORCH_HOME": (FILE,),
    "TORCH_SHOW_CPP_STACKTRACES": ("1",),
    "TORCH_CPP_LOG_LEVEL": ("x", "INFO"),
    "TORCH_FORCE_WEIGHTS_ONLY_LOAD": ("x",),
    "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": ("x",),
    "TORCH_USE_RTLD_GLOBAL": ("1",),
    "TORCH_CUDA_ARCH_LIST": ("x",),
    "TORCH_BLAS_PREFER_CUBLASLT": ("x",),
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": ("1",),
    "TORCH_WARN_ONCE": ("x",),
    "TRITON_INTERPRET": ("1",),
    "ATEN_CPU_CAPABILITY": ("x", "default"),
    "ONEDNN_MAX_CPU_ISA": ("x",),
    "DNNL_VERBOSE": ("2",),
    "ONEDNN_VERBOSE": ("all",),
    "MKL_VERBOSE": ("1",),
    "MKL_THREADING_LAYER": ("x", "TBB"),
    "MKL_SERVICE_FORCE_INTEL": ("1",),
    "KMP_AFFINITY": ("x",),
    "KMP_DUPLICATE_LIB_OK": ("x",),
    "GOMP_CPU_AFFINITY": ("x", "0"),
    "GOMP_SPINCOUNT": ("x",),
    "OMP_PROC_BIND": ("x", "true"),
    "OMP_PLACES": ("x",),
    "OMP_SCHEDULE": ("x",),
    "OMP_STACKSIZE": ("x", "1"),
    "OMP_WAIT_POLICY": ("x",),
    "OMP_DYNAMIC": ("x",),
    "OMP_DISPLAY_ENV": ("true",),
    "OMP_NUM_THREADS": ("0", "1000000"),
    "OPENBLAS_CORETYPE": ("x",),
    "OPENBLAS_VERBOSE": ("2",),
    "MALLOC_ARENA_MAX": ("x",),
    "MALLOC_CHECK_": ("3",),
    "GLIBC_TUNABLES": ("x", "glibc.malloc.check=3"),
    "CC": (NOTHING,),
    "CXX": (NOTHING,),
    "TF_CPP_MIN_LOG_LEVEL": ("x",),
    "ORT_DISABLE_ALL_OPTIMIZATION": ("x",),
    "MPLBACKEND": ("module://none",),
    "JAX_PLATFORMS": ("x",),
    "PYDANTIC_DISABLE_PLUGINS": ("x", "__all__"),
    "PYDANTIC_VALIDATE_CORE_SCHEMAS": ("x",),
    "PILLOW_ALIGNMENT": ("x",),
    "PILLOW_BLOCK_SIZE": ("x",),
    "PILLOW_BLOCKS_MAX": ("-1",),
    "SQLITE_TMPDIR": (NO_FOLDER,),
    "AV_LOG_FORCE_COLOR": ("1",),
    "FFMPEG_BINARY": (NOTHING,),
    "IMAGEIO_USERDIR": (NO_FOLDER,),
    "IMAGEIO_FFMPEG_NO_PREVENT_SIGINT": ("1",),
    "UVICORN_PORT": ("x",),
    "UVICORN_LOOP": ("x",),
    "PORT": ("x",),
    "HOST": ("x",),
    "DEBUG": ("*",),
    "NOTIFY_SOCKET": (NOTHING,),
    "LISTEN_FDS": ("x",),
    "WATCHFILES_FORCE_POLLING": ("x",),
    "HYPOTHESIS_PROFILE": ("x",),
    "COVERAGE_PROCESS_START": (NOTHING,),
    # The terminal, the system and Python.
    "TERM": ("dumb", "x"),
    "COLUMNS": ("x", "1", "1000000"),
    "LINES": ("x",),
    "NO_COLOR": ("1",),
    "FORCE_COLOR": ("1",),
    "TTY_INTERACTIVE": ("x",),
    "TTY_COMPATIBLE": ("x",),
    "TERMINAL_WIDTH": ("x",),
    "_TYPER_FORCE_DISABLE_TERMINAL": ("x",),
    "TYPER_USE_RICH": ("x",),
    "TYPER_STANDARD_TRACEBACK": ("x",),
    "_APP_PY_COMPLETE": ("x", "complete_bash"),
    "_APP.PY_COMPLETE": ("complete_bash",),
    "COLORTERM": ("x",),
    "JUPYTER_COLUMNS": ("x",),
    "LANG": ("x", "C"),
    "LANGUAGE": ("x:y",),
    "LC_ALL": ("C", "POSIX"),
    "LC_CTYPE": ("x",),
    "TZ": ("x", ":/etc/none", ""),
    "TZDIR": (NOTHING,),
    "PYTHONTZPATH": ("x",),
    "HOME": ("", "relative", FILE),
    "USER": ("",),
    "LOGNAME": ("x/y",),
    "SHELL": (NOTHING,),
    "PAGER": (NOTHING,),
    "TMPDIR": ("", NOTHING, "relative"),
    "TMP": (FILE,),
    "TEMP": (NO_FOLDER,),
    "PATH": ("", NOTHING),
    "PWD": (NOTHING,),
    "OLDPWD": (NOTHING,),
    "CDPATH": ("/tmp",),
    "BASH_ENV": (NOTHING,),
    "ENV": (NOTHING,),
    "IFS": ("/",),
    "POSIXLY_CORRECT": ("1",),
    "SHELLOPTS": ("errexit:nounset:xtrace",),
    "BASHOPTS": ("x", "failglob"),
    "GLOBIGNORE": ("*",),
    "GREP_OPTIONS": ("x",),
    "PYTHONIOENCODING": ("ascii", "x"),
    "PYTHONUNBUFFERED": ("x",),
    "PYTHONDONTWRITEBYTECODE": ("x",),
    "PYTHONNOUSERSITE": ("x",),
    "PYTHONUSERBASE": (NOTHING,),
    "PYTHONFAULTHANDLER": ("x",),
    "PYTHONTRACEMALLOC": ("5",),
    "PYTHONVERBOSE": ("1",),
    "PYTHONBREAKPOINT": ("x",),
    "PYTHONCOERCECLOCALE": ("x",),
    "PYTHONINTMAXSTRDIGITS": ("640",),
    "PYTHONNODEBUGRANGES": ("1",),
    "PYTHONCASEOK": ("1",),
    "PYTHONLEGACYWINDOWSSTDIO": ("x",),
    "PYTHON_GIL": ("1",),
    "PYTHONPATH": (NOTHING,),
    "PIP_CONFIG_FILE": (NOTHING,),
    "PIP_REQUIRE_VIRTUALENV": ("x",),
    "PIP_NO_CACHE_DIR": ("x",),
    "UV_SYSTEM_PYTHON": ("x",),
    "SOURCE_DATE_EPOCH": ("x",),
    "PYTEST_ADDOPTS": ("-x",),
    "DISPLAY": (":99",),
    "WAYLAND_DISPLAY": ("x",),
    "BROWSER": ("", "%s", "no-such-browser"),
}
# Refused on purpose: the variable's own meaning is asked for.
REFUSED: Mapping[str, str] = {
    "IMAGEIO_FFMPEG_EXE": NOTHING,
    "HF_HUB_OFFLINE": "perhaps",
}


def environment(cache_dir: Path, values: Mapping[str, str]) -> dict[str, str]:
    """Return an environment with the cache folder, these values and nothing else."""
    needed = {name: os.environ[name] for name in _UNAVOIDABLE if name in os.environ}
    return {**needed, "TANDEM_CACHE_DIR": str(cache_dir), "TANDEM_MODEL": MODEL, "TANDEM_IDLE_BUILDS": "0", **values}


def _run(command: Sequence[str], cache_dir: Path, values: Mapping[str, str]) -> str:
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=environment(cache_dir, values),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="backslashreplace",
        timeout=600,
        check=False,
    )
    return _judged(done.returncode, done.stdout + done.stderr, values)


def _judged(code: int, printed: str, values: Mapping[str, str]) -> str:
    """Return "works", "refuses", or what is wrong."""
    if "Traceback" in printed or "Internal error" in printed or code not in (0, 2):
        return f"exit code {code}: {printed[-600:]}"
    if code == 0:
        return "works"
    lines = [line for line in printed.splitlines() if line.startswith(("Error: ", "To do: "))]
    named = any(name in line for name in values for line in lines)
    return "refuses" if named else f"refuses without the variable's name: {printed[-600:]}"


def _served(command: Sequence[str], page: str, cache_dir: Path, values: Mapping[str, str]) -> str:
    port = free_port()
    log = cache_dir / "served.txt"
    with log.open("w", encoding="utf-8") as output:
        process = subprocess.Popen(
            [*command, "--port", str(port)],
            cwd=ROOT,
            env=environment(cache_dir, values),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def up() -> bool:
        if process.poll() is not None or f":{port}/" not in log.read_text("utf-8", "replace"):
            return process.poll() is not None
        with opener.open(f"http://127.0.0.1:{port}/{page}", timeout=30) as answer:
            return bool(answer.status == 200)

    try:
        until(up, seconds=300, pause=0.2)
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        code = process.wait(60)
    finally:
        process.kill()
        process.wait()
    return _judged(code, log.read_text("utf-8", "replace"), values)


_APP = (sys.executable, "app.py")
_VIDEO = ("--width", "64", "--height", "32", "--frames", "1", "--steps", "1")


def command(*arguments: str, cache_dir: Path, values: Mapping[str, str]) -> str:
    """Run a command."""
    return _run([*_APP, *arguments], cache_dir, values)


def plan(cache_dir: Path, values: Mapping[str, str]) -> str:
    """Run `plan`."""
    return _run([*_APP, "plan", "a red boat"], cache_dir, values)


def install(cache_dir: Path, values: Mapping[str, str]) -> str:
    """Run `./install.sh plan`."""
    return _run(["./install.sh", "plan", "a red boat"], cache_dir, values)


def generate(cache_dir: Path, values: Mapping[str, str]) -> str:
    """Make a video."""
    out = cache_dir / "x.mp4"
    out.unlink(missing_ok=True)
    found = _run([*_APP, "generate", "a red boat", *_VIDEO, "--out", str(out)], cache_dir, values)
    return "made no video" if found == "works" and not out.is_file() else found


def serve(cache_dir: Path, values: Mapping[str, str]) -> str:
    """Start the HTTP API and end it with Ctrl-C."""
    return _served([*_APP, "serve"], "healthz", cache_dir, values)


def app(cache_dir: Path, values: Mapping[str, str]) -> str:
    """Start the web app and end it with Ctrl-C. It opens a browser only if `BROWSER` is among the values."""
    browser = {"DISPLAY": ":99"} if "BROWSER" in values else {}
    return _served([*_APP, *([] if browser else ["--no-browser"])], "", cache_dir, {**values, **browser})


RUNS: Mapping[str, Callable[[Path, Mapping[str, str]], str]] = {
    run.__name__: run for run in (install, plan, serve, app, generate)
}


def runs_with(name: str) -> list[str]:
    """Return what can run with a variable: without the installer, Python itself ends for some."""
    if name in _UNUSABLE_EVEN_FOR_PYTHON:
        return ["install"]
    return ["install", "plan"] if name in _SLOW else list(RUNS)


def broken(run: str, cache_dir: Path, names: Sequence[str]) -> dict[str, str]:
    """Run with many variables at once, and with halves of them where that fails; return what fails alone, and how.

    Variables that fail only together are returned under their names, joined.
    """
    found = RUNS[run](cache_dir, {name: TABLE[name] for name in names})
    if found == "works":
        return {}
    if len(names) == 1:
        return {names[0]: found}
    half = len(names) // 2
    parts = broken(run, cache_dir, names[:half]) | broken(run, cache_dir, names[half:])
    return parts or {" ".join(names): found}


__all__ = ["ALONE", "REFUSED", "RUNS", "TABLE", "broken", "command", "make_cache", "runs_with"]
