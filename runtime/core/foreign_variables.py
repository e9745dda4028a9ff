"""Variables of other programs that libraries would read: dropped, or kept back for downloads, before libraries load.

A desktop, a shell profile or a container sets variables for other programs. Most are harmless; each row of `_RULES`
names some that would stop a library, change its results, or have it do what only Tandem decides, with the values that
may stay. The first matching row applies. `prepare` is called once, at the start of the program; its other processes
inherit the result.
"""

import contextlib
import ipaddress
import os
import re
from collections.abc import Callable, Mapping, MutableMapping
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

# A variable that only downloads need, and which cannot be used, is renamed: downloads are refused because of it.
_KEPT_BACK = "TANDEM_UNUSABLE_"
_THIS_MACHINE = ("localhost", "127.0.0.1", "::1")
_SCHEMES = {"http", "https"}
_SOCKS = {"socks5", "socks5h"}
_HOST = re.compile(r"[A-Za-z0-9_.-]+")
_NAME_IN_NO_PROXY = re.compile(r"(\*|(\*?\.)?[A-Za-z0-9_.-]+)(:[0-9]{1,4})?")
_PROCESSORS = re.compile(r"[0-9]{1,6}(-[0-9]{1,6}(:[0-9]{1,6})?)?")
_LEVELS = {"debug", "info", "warning", "error", "critical"}


class _Rule(NamedTuple):
    """What happens to variables.

    Attributes:
        names: exact, or with `*` at the end for all that begin so.
        stays: whether a value stays.
        kept_back: whether downloads are refused because of another value.
    """

    names: tuple[str, ...]
    stays: Callable[[str], bool]
    kept_back: bool = False


def _always(_value: str) -> bool:
    return True


def _never(_value: str) -> bool:
    return False


def _number(value: str) -> bool:
    """Return whether a value is a positive whole number."""
    return re.fullmatch(r"\s*0*[1-9][0-9]{0,8}\s*", value, re.ASCII) is not None


def _numbers(value: str) -> bool:
    """Return whether a value is a list of such numbers, as of OpenMP."""
    return all(map(_number, value.split(",")))


def _processors(value: str) -> bool:
    """Return whether a value is a list such as "0 3 1-2 4-15:2". libgomp searches others without an end."""
    return all(map(_PROCESSORS.fullmatch, value.replace(",", " ").split()))


def _level(value: str) -> bool:
    return value.lower() in _LEVELS


def _folder(value: str) -> bool:
    """Return whether a value is a folder that files can be written to; it is created, as libraries do."""
    probe = Path(value, f".tandem-{os.getpid()}")
    try:
        probe.parent.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except (OSError, ValueError):
        return False
    return value != ""


def _appendable(value: str) -> bool:
    """Return whether a value is a file that can be written."""
    try:
        Path(value).open("ab").close()
    except (OSError, ValueError):
        return False
    return True


def _certificates_file(value: str) -> bool:
    if not value:
        return True
    import ssl

    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cafile=value)
    except (OSError, ValueError):  # ssl.SSLError is an OSError
        return False
    return True


def _certificates_folders(value: str) -> bool:
    return not value or all(map(os.path.isdir, value.split(os.pathsep)))


def _token(value: str) -> bool:
    """Return whether a value can be sent in a header; white space around it is ignored, also line breaks."""
    return value.strip().isascii() and value.strip().isprintable()


def _proxy(value: str) -> bool:
    """Return whether httpx can use a proxy. A value without a scheme is an HTTP proxy's."""
    if not value.strip():
        return True
    try:
        parts = urlsplit(value if "://" in value else f"http://{value}")
        host, _ = parts.hostname or "", parts.port
    except ValueError:
        return False
    supported = parts.scheme in _SCHEMES or (parts.scheme in _SOCKS and find_spec("socksio") is not None)
    return supported and value.isascii() and value.isprintable() and " " not in value and _is_host(host)


def _address(value: str) -> bool:
    """Return whether huggingface_hub, which reads the address when it is imported, can."""
    try:
        _ = urlsplit(value).port
    except ValueError:
        return False
    return True


def _is_host(host: str) -> bool:
    with contextlib.suppress(ValueError):
        ipaddress.ip_address(host)
        return True
    return _HOST.fullmatch(host) is not None and all(host.split("."))


_RULES: tuple[_Rule, ...] = (
    # Tandem's own share server, and what Tandem itself sets.
    _Rule(("GRADIO_SHARE_SERVER_ADDRESS",), bool),
    # Tandem sets all of Gradio's options itself: addresses, folders, threads, debugging, links, pages.
    _Rule(("GRADIO_*",), _never),
    # Of a hosted service whose pages Gradio changes.
    _Rule(("SPACE_*", "SPACES_*", "SYSTEM", "KAGGLE_KERNEL_RUN_TYPE", "OAUTH_*", "OPENID_PROVIDER_URL"), _never),
    # Of uvicorn and FastAPI, which Tandem runs with its own options.
    _Rule(("WEB_CONCURRENCY", "FASTAPI_*"), _never),
    # Proxies, certificates and tokens are for downloads alone.
    _Rule(("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"), _proxy, kept_back=True),
    _Rule(("SSL_CERT_FILE",), _certificates_file, kept_back=True),
    _Rule(("SSL_CERT_DIR",), _certificates_folders, kept_back=True),
    _Rule(("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"), _token, kept_back=True),
    _Rule(("HF_ENDPOINT",), _address, kept_back=True),
    _Rule(("SSLKEYLOGFILE",), _appendable),
    _Rule(("HF_HUB_DOWNLOAD_TIMEOUT", "HF_HUB_ETAG_TIMEOUT"), _number),
    # Progress bars, which Tandem does not show.
    _Rule(("TQDM_*",), _never),
    # Which libraries may be used; only the ones that Tandem needs are installed.
    _Rule(("USE_TORCH", "USE_TF", "USE_FLAX", "USE_JAX", "FORCE_TF_AVAILABLE", "USE_ONNXRUNTIME"), _never),
    _Rule(("DIFFUSERS_VERBOSITY", "TRANSFORMERS_VERBOSITY", "HF_HUB_VERBOSITY"), _level),
    _Rule(("DIFFUSERS_*", "ACCELERATE_*", "FSDP_*", "PARALLELISM_CONFIG_*"), _never),
    # Of programs that start several processes. Tandem starts its own, with other means.
    _Rule(("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK", "ROLE_RANK"), _never),
    _Rule(("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_*", "TORCH_DIST_INIT_BARRIER"), _never),
    # Caches of compiled code: without these, in Tandem's cache folder.
    _Rule(("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TRITON_HOME", "TRITON_DUMP_DIR"), _folder),
    _Rule(("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", "TORCH_EXTENSIONS_DIR", "MPLCONFIGDIR", "NUMBA_CACHE_DIR"), _folder),
    # How PyTorch compiles is part of an engine and of measurements; its debugging ends the import for a wrong value.
    _Rule(("TORCHINDUCTOR_COMPILE_THREADS",), _number),
    _Rule(("TORCHDYNAMO_DISABLE", "TORCH_COMPILE_DISABLE"), _always),
    _Rule(("TORCHINDUCTOR_*", "TORCHDYNAMO_*", "AOTINDUCTOR_*", "AOT_INDUCTOR_*", "TORCH_COMPILE_*"), _never),
    _Rule(("TORCH_LOGS*", "TORCH_TRACE*", "TORCH_DISTRIBUTED_DEBUG", "TORCH_DTRACE", "QUACK_*"), _never),
    _Rule(("TORCH_DISABLE_NATIVE_JIT", "TORCH_NATIVE_SKIP_VERSION_CHECK"), _number),
    _Rule(("TORCH_DEVICE_BACKEND_AUTOLOAD", "PYTORCH_JIT*"), _never),
    # libgomp and others print a line for a wrong value.
    _Rule(("OMP_NUM_THREADS", "OMP_THREAD_LIMIT"), _numbers),
    _Rule(("GOMP_CPU_AFFINITY",), _processors),
    _Rule(("MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS", "NUMEXPR_MAX_THREADS"), _number),
    # NumPy and protobuf are not imported with a wrong value.
    _Rule(("NPY_*", "PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION*"), _never),
    # Another cluster's.
    _Rule(("RAY_ADDRESS", "RAY_NAMESPACE", "RAY_TMPDIR", "RAY_RUNTIME_ENV*", "RAY_JOB_*", "RAY_CLIENT_MODE"), _never),
    # ffmpeg would write a report, with the prompt, to the current folder.
    _Rule(("FFREPORT",), _never),
    _Rule(("COLUMNS", "LINES", "TERMINAL_WIDTH"), _number),
)


def prepare(environ: MutableMapping[str, str] = os.environ) -> None:
    """Drop variables that would disturb libraries, and let no proxy apply to this machine.

    Call before libraries are imported.
    """
    for name, value in list(environ.items()):
        rule = _rule(name)
        if rule is None or rule.stays(value):
            continue
        del environ[name]
        if rule.kept_back:
            environ[f"{_KEPT_BACK}{name}"] = value
    use_no_proxy_for_this_machine(environ)


def value_of(name: str, environ: Mapping[str, str] = os.environ) -> str:
    """Return a variable's value, also one that was kept back; empty if it is not set."""
    return environ.get(name) or environ.get(f"{_KEPT_BACK}{name}", "")


def _rule(name: str) -> _Rule | None:
    return next((rule for rule in _RULES if any(_matches(name, pattern) for pattern in rule.names)), None)


def _matches(name: str, pattern: str) -> bool:
    return name.startswith(pattern[:-1]) if pattern.endswith("*") else name == pattern


def use_no_proxy_for_this_machine(environ: MutableMapping[str, str] = os.environ) -> None:
    """Have libraries connect to this machine without a proxy; drop exceptions that httpx cannot read.

    Addresses in brackets lose them, as httpx adds its own.
    """
    for name in ("no_proxy", "NO_PROXY"):
        # The other spelling holds if this one is not set; libraries differ in which one they read first.
        value = environ.get(name) or environ.get(name.swapcase(), "")
        entries = [entry for entry in map(_exception, value.split(",")) if entry]
        environ[name] = ",".join(dict.fromkeys([*entries, *_THIS_MACHINE]))


def _exception(entry: str) -> str:
    """Return an entry of NO_PROXY as libraries read it, empty if they cannot."""
    entry = entry.strip()
    with contextlib.suppress(ValueError):
        return str(ipaddress.ip_address(entry.strip("[]")))
    with contextlib.suppress(ValueError):
        if "/" in entry:
            return str(ipaddress.IPv4Network(entry, strict=False))
        entry.encode("ascii").decode("idna")  # httpx does so
        return entry if _NAME_IN_NO_PROXY.fullmatch(entry) and ".." not in entry else ""
    return ""


def problem_of_downloads(
    address: str, environ: Mapping[str, str] = os.environ, *, with_token: bool = False
) -> str | None:
    """Return the variable that a download from an address needs, and which cannot be used.

    Args:
        with_token: whether the access token of huggingface.co may be sent.
    """
    parts = urlsplit(address)
    if parts.hostname in _THIS_MACHINE:
        return None
    names = ["HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"] if with_token else []
    if parts.scheme == "https":
        names += ["SSL_CERT_FILE", "SSL_CERT_DIR"]
    if not _is_exempt(parts.hostname or "", environ):
        for proxy in (f"{parts.scheme}_proxy", "all_proxy"):
            spellings = (proxy, proxy.upper())
            if any(environ.get(name) for name in spellings):
                break
            names += spellings
    return next((name for name in names if environ.get(f"{_KEPT_BACK}{name}")), None)


def _is_exempt(host: str, environ: Mapping[str, str]) -> bool:
    from urllib.request import proxy_bypass_environment  # type: ignore[attr-defined]  # not in typeshed

    return bool(proxy_bypass_environment(host, {"no": environ.get("no_proxy") or environ.get("NO_PROXY", "")}))
