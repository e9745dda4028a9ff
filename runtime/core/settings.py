"""Settings: flags first, then `TANDEM_*` environment variables, then `settings.json` in the cache folder.

The only module that reads them. Flags that were not given are `None`.
"""

import json
import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from runtime.core.errors import SettingsError
from runtime.core.facts import shortened
from runtime.core.request import MAX_FRAMES, MAX_STEPS

ROOT = Path(__file__).parents[2]

_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off"})
_LAST_PORT = 65_535
_LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})

# Name in settings.json and in `Settings`: its environment variable.
VARIABLES: Mapping[str, str] = {
    "host": "TANDEM_HOST",
    "port": "TANDEM_PORT",
    "auth": "TANDEM_AUTH",
    "model": "TANDEM_MODEL",
    "browser": "TANDEM_BROWSER",
    "engine_cache_dir": "TENSORRT_CACHE_DIR",
    "engine_cache_gb": "TANDEM_ENGINE_CACHE_GB",
    "tensorrt": "TANDEM_TENSORRT",
    "share": "TANDEM_SHARE",
    "share_frames": "TANDEM_SHARE_FRAMES",
    "share_size": "TANDEM_SHARE_SIZE",
    "share_steps": "TANDEM_SHARE_STEPS",
    "share_queue": "TANDEM_SHARE_QUEUE",
    "share_queue_all": "TANDEM_SHARE_QUEUE_ALL",
    "share_rate": "TANDEM_SHARE_RATE",
    "offline": "TANDEM_OFFLINE",
    "hub": "TANDEM_HUB",
}
# Variables of other programs, used if Tandem's own variable is not set.
_SHARED_VARIABLES: Mapping[str, str] = {"offline": "HF_HUB_OFFLINE", "hub": "HF_ENDPOINT"}
HUB = "https://huggingface.co"
# What `tensorrt` may name: the components behind each word.
TENSORRT_PARTS: Mapping[str, tuple[str, ...]] = {
    "text-encoders": ("text_encoder",),
    "transformer": ("transformer", "transformer_2"),
    "vae": ("vae",),
}
CACHE_VARIABLE = "TANDEM_CACHE_DIR"
# The settings that are whole numbers, with the most that each may be.
_COUNTS: Mapping[str, int] = {
    "share_frames": MAX_FRAMES,
    "share_steps": MAX_STEPS,
    "share_queue": 1_000,
    "share_queue_all": 10_000,
    "share_rate": 10_000,
}
_SIZE = re.compile(r"([1-9][0-9]{0,3})[x×]([1-9][0-9]{0,3})")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of this installation.

    Attributes:
        cache_dir: holds weights, outputs and logs.
        host, port: where the web app listens.
        auth: (user, password) of the web app.
        model: the model of requests that name none.
        browser: whether the web app opens a browser.
        engine_cache_dir: where engines are kept, if not in the cache folder.
        engine_cache_gb: the limit for all engines together, in units of 10^9 bytes.
        tensorrt: which parts the web app starts with on TensorRT, of `TENSORRT_PARTS`.
        share: whether to create a public link.
        share_frames, share_steps: the most that a visitor's video may have; `None` allows the model's own.
        share_size: (width, height) of the largest one, in either orientation; `None` allows the model's own sizes.
        share_queue, share_queue_all: how many videos one visitor, and all together, may have queued or running.
        share_rate: how many videos one visitor may request per hour.
        offline: the flag, variable or file that disables downloads; empty if they are enabled.
        hub: the address that models are downloaded from; one from HF_ENDPOINT is not validated yet.
    """

    cache_dir: Path
    host: str = "127.0.0.1"
    port: int = 7860
    auth: tuple[str, str] | None = None
    model: str = "diorama"
    browser: bool = True
    engine_cache_dir: Path | None = None
    engine_cache_gb: float = 50.0
    tensorrt: tuple[str, ...] = ()
    share: bool = False
    share_frames: int | None = None
    share_size: tuple[int, int] | None = None
    share_steps: int | None = None
    share_queue: int = 2
    share_queue_all: int = 10
    share_rate: int = 20
    offline: str = ""
    hub: str = HUB

    @property
    def backends(self) -> dict[str, str]:
        """What the web app's choice of backends starts with, by component; those not named start with "auto"."""
        return {component: "tensorrt" for part in self.tensorrt for component in TENSORRT_PARTS[part]}

    @property
    def engines_dir(self) -> Path:
        """Where engines are kept."""
        return self.engine_cache_dir or self.cache_dir / "engines"

    @property
    def outputs_dir(self) -> Path:
        """The default folder of videos."""
        return self.cache_dir / "outputs"

    @property
    def weights_dir(self) -> Path:
        """Where downloaded models are, apart from the shipped ones."""
        return self.cache_dir / "weights"

    @property
    def log_file(self) -> Path:
        """The log."""
        return self.cache_dir / "logs" / "tandem.log"


def load(flags: Mapping[str, Any] | None = None, environ: Mapping[str, str] = os.environ) -> Settings:
    """Combine flags, environment and settings file.

    Args:
        flags: by the names of `VARIABLES`; `None` stands for "not given".

    Raises:
        SettingsError: for a value that cannot be, naming where it came from.
    """
    cache_dir = _cache_dir(environ)
    values = _from_file(cache_dir / "settings.json")
    values = _from_environment(environ, _SHARED_VARIABLES) | values | _from_environment(environ, VARIABLES)
    for name, value in (flags or {}).items():
        if value is not None:
            values[name] = (value, flag_of(name))
    settings = Settings(cache_dir=cache_dir, **{name: _parsed(name, *given) for name, given in values.items()})
    if settings.host not in _LOOPBACK and settings.auth is None:
        raise SettingsError("settings.host_without_password", host=settings.host)
    if settings.share and settings.host not in _LOOPBACK:
        raise SettingsError("settings.share_with_host", host=settings.host)
    # HF_HUB_OFFLINE is about models alone.
    if settings.share and settings.offline and settings.offline != _SHARED_VARIABLES["offline"]:
        raise SettingsError("settings.share_offline", offline=settings.offline)
    return settings


def _from_environment(environ: Mapping[str, str], variables: Mapping[str, str]) -> dict[str, tuple[Any, str]]:
    return {name: (environ[variable], variable) for name, variable in variables.items() if environ.get(variable)}


def flag_of(name: str) -> str:
    """Return the flag that sets a setting."""
    return {"browser": "--no-browser", "tensorrt": "--enable-tensorrt"}.get(name, f"--{name.replace('_', '-')}")


def tensorrt_from_flags(*, enable: bool, text_encoders: bool, transformer: bool) -> str | None:
    """Return the setting `tensorrt` that the launch flags mean: all parts, or those that are named.

    Returns:
        A value for `load`, `None` where no flag was given.

    Raises:
        SettingsError: if a part is named and TensorRT is not enabled.
    """
    flags = {"text-encoders": text_encoders, "transformer": transformer}
    named = [part for part, given in flags.items() if given]
    if named and not enable:
        raise SettingsError("settings.tensorrt_not_enabled", flag=f"--tensorrt-{named[0]}")
    return (",".join(named) or "all") if enable else None


def _cache_dir(environ: Mapping[str, str]) -> Path:
    given = environ.get(CACHE_VARIABLE)
    path = Path(given).expanduser() if given else ROOT / "Cache"
    try:
        path.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        raise SettingsError(
            "settings.no_cache_folder",
            folder=path,
            error=getattr(error, "strerror", None) or str(error),
            variable=CACHE_VARIABLE,
        ) from error
    return path.resolve()


def _from_file(path: Path) -> dict[str, tuple[Any, str]]:
    if not path.exists():
        return {}
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SettingsError("settings.file_invalid", file=path) from error
    unknown = sorted(set(values) - set(VARIABLES)) if isinstance(values, dict) else ["(not an object)"]
    if unknown:
        raise SettingsError("settings.unknown", file=path, unknown=unknown, known=list(VARIABLES))
    return {name: (value, str(path)) for name, value in values.items()}


def _parsed(name: str, value: Any, source: str) -> Any:
    parser = _PARSERS.get(name)
    if parser is not None:
        return parser(value, source)
    if name in _COUNTS:
        return _count(value, source, _COUNTS[name])
    if not isinstance(value, str) or not value.strip() or not value.isprintable():
        raise SettingsError("settings.empty", source=source, name=name.replace("_", " "))
    return _folder(value.strip(), source) if name == "engine_cache_dir" else value.strip()


def _auth(value: Any, source: str) -> tuple[str, str]:
    user, separator, password = value.partition(":") if isinstance(value, str) else ("", "", "")
    if not (user and separator and password):
        raise SettingsError("settings.auth_invalid", source=source)
    return user, password


def _folder(value: str, source: str) -> Path:
    try:
        path = Path(value).expanduser().resolve()
        usable = path.is_dir() or not path.exists()
    except (OSError, RuntimeError):  # no such user's home, a name too long, a folder that may not be entered
        usable = False
    if not usable:
        raise SettingsError("settings.not_a_folder", source=source, value=value[:200])
    return path


def _gigabytes(value: Any, source: str) -> float:
    try:
        size = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        size = math.nan
    if not (math.isfinite(size) and size >= 0):
        raise SettingsError("settings.not_gigabytes", source=source, value=shortened(str(value)))
    return size


def _tensorrt(value: Any, source: str) -> tuple[str, ...]:
    words = [word.strip().lower() for word in value.split(",")] if isinstance(value, str) else [""]
    if words == ["all"]:
        return tuple(TENSORRT_PARTS)
    if words == ["none"]:
        return ()
    if not set(words) <= set(TENSORRT_PARTS):
        known = list(TENSORRT_PARTS)
        raise SettingsError("settings.tensorrt_invalid", source=source, value=shortened(str(value)), known=known)
    return tuple(part for part in TENSORRT_PARTS if part in words)


def _count(value: Any, source: str, most: int) -> int:
    try:
        count = 0 if isinstance(value, bool) or (isinstance(value, float) and value % 1) else int(value)
    except (TypeError, ValueError, OverflowError):
        count = 0
    if not 1 <= count <= most:
        raise SettingsError("settings.not_a_count", source=source, value=shortened(str(value)), most=most)
    return count


def _size(value: Any, source: str) -> tuple[int, int]:
    match = _SIZE.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None:
        raise SettingsError("settings.not_a_size", source=source, value=shortened(str(value)))
    return int(match[1]), int(match[2])


def _port(value: Any, source: str) -> int:
    try:
        port = int(value)
    except (TypeError, ValueError):
        port = 0
    if not 1 <= port <= _LAST_PORT:
        raise SettingsError("settings.not_a_port", source=source, value=shortened(str(value)), most=_LAST_PORT)
    return port


def check_hub(value: Any, source: str) -> str:
    """Read a hub's address; return it without a slash at its end.

    http is allowed for this machine only: in transit, models and their hashes could both be replaced.

    Raises:
        SettingsError: if it is not valid, naming its `source`.
    """
    text = value.strip().rstrip("/") if isinstance(value, str) else ""
    try:
        parts = urlsplit(text if text.isprintable() and " " not in text else "")
        host, _ = parts.hostname, parts.port
    except ValueError:
        parts, host = urlsplit(""), None
    if not host or parts.scheme not in {"http", "https"} or parts.query or parts.fragment:
        raise SettingsError("settings.not_a_hub", source=source, value=shortened(str(value)), hub=HUB)
    if parts.username is not None or parts.password is not None:
        raise SettingsError("settings.hub_with_password", source=source)
    if parts.scheme == "http" and host not in _LOOPBACK:
        raise SettingsError("settings.hub_without_https", source=source, value=shortened(text), hub=HUB)
    return text


def _switch(value: Any, source: str) -> bool:
    text = str(value).strip().lower()
    if text in _TRUE or text in _FALSE:
        return text in _TRUE
    raise SettingsError("settings.not_a_switch", source=source, value=shortened(str(value)))


def _offline(value: Any, source: str) -> str:
    return source if _switch(value, source) else ""


def _hub(value: Any, source: str) -> str:
    # A variable of other programs is validated only when a download uses it.
    return str(value) if source == _SHARED_VARIABLES["hub"] else check_hub(value, source)


_PARSERS: Mapping[str, Callable[[Any, str], Any]] = {
    "port": _port,
    "auth": _auth,
    "browser": _switch,
    "share": _switch,
    "share_size": _size,
    "engine_cache_gb": _gigabytes,
    "tensorrt": _tensorrt,
    "offline": _offline,
    "hub": _hub,
}
