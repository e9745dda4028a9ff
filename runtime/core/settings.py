"""Settings: flags first, then `TANDEM_*` environment variables, then `settings.json` in the cache folder.

The only module that reads them. Flags that were not given are `None`.
"""

import os
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args
from urllib.parse import urlsplit

from pydantic import Field, StringConstraints, TypeAdapter, ValidationError, ValidationInfo, field_validator

from runtime.core.errors import SettingsError
from runtime.core.facts import shortened
from runtime.core.files import is_no_file_on_windows
from runtime.core.foreign_variables import value_of
from runtime.core.frozen import FrozenModel
from runtime.core.request import FINISHERS, MAX_FRAMES, MAX_STEPS
from runtime.core.request_fields import read_size
from runtime.core.untrusted_files import read_json

ROOT = Path(__file__).parents[2]

_MAX_PORT = 65_535
_MOST_DAYS = 36_500
# Unknown names in one message.
_MOST_NAMED = 3
# Names and addresses of this machine, which no other machine reaches.
LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})

# Name in settings.json and in `Settings`: its environment variable.
VARIABLES: Mapping[str, str] = {
    "host": "TANDEM_HOST",
    "port": "TANDEM_PORT",
    "auth": "TANDEM_AUTH",
    "model": "TANDEM_MODEL",
    "browser": "TANDEM_BROWSER",
    "engine_cache_dir": "TENSORRT_CACHE_DIR",
    "engine_cache_gb": "TANDEM_ENGINE_CACHE_GB",
    "idle_builds": "TANDEM_IDLE_BUILDS",
    "tensorrt": "TANDEM_TENSORRT",
    "decoder_tensorrt": "TENSORRT_ENABLED",
    "decoder_precision": "TENSORRT_PRECISION",
    "share": "TANDEM_SHARE",
    "share_frames": "TANDEM_SHARE_FRAMES",
    "share_size": "TANDEM_SHARE_SIZE",
    "share_steps": "TANDEM_SHARE_STEPS",
    "share_queue": "TANDEM_SHARE_QUEUE",
    "share_queue_all": "TANDEM_SHARE_QUEUE_ALL",
    "share_rate": "TANDEM_SHARE_RATE",
    "keep_days": "TANDEM_KEEP_DAYS",
    "keep_videos": "TANDEM_KEEP_VIDEOS",
    "keep_bytes": "TANDEM_KEEP_BYTES",
    "on_done": "TANDEM_ON_DONE",
    "enhancer": "TANDEM_ENHANCER",
    "enhancer_model": "TANDEM_ENHANCER_MODEL",
    "enhancer_key": "TANDEM_ENHANCER_KEY",
    "offline": "TANDEM_OFFLINE",
    "hub": "TANDEM_HUB",
}
# Variables of other programs, used if Tandem's own variable is not set.
_SHARED_VARIABLES: Mapping[str, str] = {
    "engine_cache_dir": "FRAMEPACK_TENSORRT_CACHE_DIR",
    "offline": "HF_HUB_OFFLINE",
    "hub": "HF_ENDPOINT",
}
HUB = "https://huggingface.co"
TensorRTPart = Literal["text-encoders", "transformer", "vae"]
Precision = Literal["fp16", "bf16", "fp32"]
# By torch's names.
PRECISIONS: Mapping[Precision, str] = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}
# The components of each part that `tensorrt` may name.
TENSORRT_PARTS: Mapping[TensorRTPart, tuple[str, ...]] = {
    "text-encoders": ("text_encoder", "text_encoder_2", "connectors", "image_encoder"),
    "transformer": ("transformer", "transformer_2"),
    "vae": ("vae_encoder", "latent_upsampler", "vae", "audio_vae", "vocoder", *FINISHERS),
}
CACHE_VARIABLE = "TANDEM_CACHE_DIR"
_NUMBERS = (
    "port",
    "engine_cache_gb",
    "share_frames",
    "share_steps",
    "share_queue",
    "share_queue_all",
    "share_rate",
    "keep_days",
    "keep_videos",
    "keep_bytes",
)
_Side = Annotated[int, Field(strict=True, ge=1, le=9_999)]
# Text that is not empty and can be printed.
Text = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1, pattern=r"^[^\x00-\x1f\x7f]*$")]
# The code of the error for an invalid value; the other settings are text.
_INVALID: Mapping[str, str] = {
    "port": "settings.not_a_count",
    "auth": "settings.auth_invalid",
    "browser": "settings.not_a_switch",
    "share": "settings.not_a_switch",
    "offline": "settings.not_a_switch",
    "engine_cache_dir": "settings.not_a_folder",
    "engine_cache_gb": "settings.not_gigabytes",
    "idle_builds": "settings.not_a_switch",
    "tensorrt": "settings.tensorrt_invalid",
    "decoder_tensorrt": "settings.not_a_switch",
    "decoder_precision": "settings.not_a_precision",
    "share_size": "settings.not_a_size",
    "share_frames": "settings.not_a_count",
    "share_steps": "settings.not_a_count",
    "share_queue": "settings.not_a_count",
    "share_queue_all": "settings.not_a_count",
    "share_rate": "settings.not_a_count",
    "keep_days": "settings.not_days",
    "keep_videos": "settings.not_a_count",
    "keep_bytes": "settings.not_a_count",
    "on_done": "settings.not_a_command",
    "enhancer": "settings.not_an_enhancer",
    "enhancer_model": "settings.not_a_word",
    "enhancer_key": "settings.not_a_word",
}
# Settings whose values can be secret: errors do not have them.
_SECRET = frozenset({"auth", "enhancer", "enhancer_key"})


class Settings(FrozenModel):
    """Settings of this installation.

    Attributes:
        cache_dir: folder for weights, outputs and logs.
        host, port: address of the web app.
        auth: (user, password) of the web app.
        model: the model of requests that name none.
        browser: whether the web app opens a browser.
        engine_cache_dir: folder for engines; `None` for the one in the cache folder.
        engine_cache_gb: maximum size of all engines together, in units of 10^9 bytes.
        idle_builds: whether the web app and `serve` build engines that no request asks for while no video waits.
        tensorrt: parts for which the web app selects TensorRT at start.
        decoder_tensorrt: whether decoders of single frames may run on TensorRT.
        decoder_precision: of their TensorRT engines; `None` for the builder's own.
        share: whether to create a public link.
        share_frames, share_steps: maximum of a visitor's video; `None` allows the model's default.
        share_size: its maximum (width, height), in either orientation; `None` allows the model's sizes.
        share_queue, share_queue_all: maximum of queued and running videos per visitor, and of all visitors.
        share_rate: videos that one visitor may request per hour.
        keep_days, keep_videos, keep_bytes: how long ended videos are kept, and how many and how much of the user and of
            each visitor and key; `None` keeps all.
        on_done: program and arguments that run when a video is done or fails; empty runs none.
        enhancer: the chat model that enhances prompts: its name or folder, or the address of an OpenAI-compatible
            server, without a slash at its end; `None` has none.
        enhancer_model, enhancer_key: the model's name at that server, and the key that it asks for.
        offline: the flag, variable or file that disables downloads; empty if they are enabled.
        hub: the address that models are downloaded from; one from HF_ENDPOINT is not validated yet.
    """

    cache_dir: Path
    host: Text = "127.0.0.1"
    port: int = Field(default=7860, ge=1, le=_MAX_PORT)
    auth: tuple[Annotated[str, Field(min_length=1)], Annotated[str, Field(min_length=1)]] | None = None
    model: Text = "diorama"
    browser: bool = True
    engine_cache_dir: Path | None = None
    engine_cache_gb: float = Field(default=50.0, ge=0, allow_inf_nan=False)
    idle_builds: bool = True
    tensorrt: tuple[TensorRTPart, ...] = ()
    decoder_tensorrt: bool = True
    decoder_precision: Precision | None = None
    share: bool = False
    share_frames: int | None = Field(default=None, ge=1, le=MAX_FRAMES)
    share_size: tuple[_Side, _Side] | None = None
    share_steps: int | None = Field(default=None, ge=1, le=MAX_STEPS)
    share_queue: int = Field(default=2, ge=1, le=1_000)
    share_queue_all: int = Field(default=10, ge=1, le=10_000)
    share_rate: int = Field(default=20, ge=1, le=10_000)
    keep_days: float | None = Field(default=None, gt=0, le=_MOST_DAYS, allow_inf_nan=False)
    keep_videos: int | None = Field(default=None, ge=1, le=10_000_000)
    keep_bytes: int | None = Field(default=None, ge=1, le=1 << 60)
    on_done: tuple[Annotated[str, Field(max_length=4_096, pattern=r"^[^\x00]*$")], ...] = Field(
        default=(), max_length=100
    )
    enhancer: Text | None = None
    enhancer_model: Text | None = None
    # What a header can have.
    enhancer_key: Annotated[str, StringConstraints(strip_whitespace=True, pattern=r"^[\x21-\x7e]+$")] | None = Field(
        default=None, repr=False
    )
    offline: str = ""
    hub: str = HUB

    @field_validator(*_NUMBERS, mode="before")
    @classmethod
    def _refuse_switch(cls, value: Any) -> Any:
        if isinstance(value, bool):
            raise ValueError
        return value

    @field_validator("auth", mode="before")
    @classmethod
    def _parse_auth(cls, value: Any) -> Any:
        return value.split(":", 1) if isinstance(value, str) else value

    @field_validator("engine_cache_dir", mode="before")
    @classmethod
    def _parse_folder(cls, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        if not value.strip() or not value.isprintable():
            raise ValueError
        return value.strip()

    @field_validator("engine_cache_dir")
    @classmethod
    def _check_folder(cls, path: Path | None) -> Path | None:
        try:
            path = path and path.expanduser().resolve()
            # A folder that is still to be made must not lie below a file.
            usable = path is None or next(place for place in (path, *path.parents) if place.exists()).is_dir()
            if path and sys.platform == "win32":
                usable = usable and not any(map(is_no_file_on_windows, path.parts[1:]))
        except (OSError, RuntimeError):  # no such user's home, a name too long, a folder that may not be entered
            usable = False
        if not usable:
            raise ValueError
        return path

    @field_validator("tensorrt", mode="before")
    @classmethod
    def _parse_parts(cls, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        words = [word.strip().lower() for word in value.split(",")]
        if words in (["all"], ["none"]):
            return get_args(TensorRTPart) if words == ["all"] else ()
        return [part for part in TENSORRT_PARTS if part in words] if set(words) <= set(TENSORRT_PARTS) else words

    @field_validator("on_done", mode="before")
    @classmethod
    def _parse_command(cls, value: Any) -> Any:
        command = split_command(value) if isinstance(value, str) else value
        if isinstance(command, list) and command and _is_batch_file(command[0]):
            raise ValueError
        return command

    @field_validator("browser", "share", "idle_builds", "decoder_tensorrt", "decoder_precision", mode="before")
    @classmethod
    def _parse_word(cls, value: Any) -> Any:
        return value.strip().lower() if isinstance(value, str) else value

    @field_validator("enhancer")
    @classmethod
    def _check_enhancer(cls, value: str | None) -> str | None:
        if value is None or not is_address(value):
            return value
        parts = urlsplit(value)
        # A password in an address would appear in messages.
        has_more = "@" in parts.netloc or parts.query or parts.fragment
        if " " in value or not parts.hostname or parts.port == 0 or has_more:
            raise ValueError
        return value.rstrip("/")

    @field_validator("share_size", mode="before")
    @classmethod
    def _parse_size(cls, value: Any) -> Any:
        return (read_size(value) or value) if isinstance(value, str) else value

    @field_validator("offline", mode="before")
    @classmethod
    def _name_switch(cls, value: Any, info: ValidationInfo) -> Any:
        if info.context is None:
            return value
        return info.context["offline"] if TypeAdapter(bool).validate_python(cls._parse_word(value)) else ""

    @field_validator("hub", mode="before")
    @classmethod
    def _check_address(cls, value: Any, info: ValidationInfo) -> Any:
        # A variable of other programs is validated only when a download uses it.
        if info.context is None or info.context["hub"] == _SHARED_VARIABLES["hub"]:
            return value
        return check_hub(value, info.context["hub"])

    @property
    def backends(self) -> dict[str, str]:
        """Backends that the web app selects at start, by component; the others start with "auto"."""
        return {component: "tensorrt" for part in self.tensorrt for component in TENSORRT_PARTS[part]}

    @property
    def engines_dir(self) -> Path:
        """The folder of the engine library."""
        return self.engine_cache_dir or self.cache_dir / "engines"

    @property
    def outputs_dir(self) -> Path:
        """The default folder of videos."""
        return self.cache_dir / "outputs"

    @property
    def latents_dir(self) -> Path:
        """The folder whose files of latents the web app lists."""
        return self.cache_dir / "latents"

    @property
    def weights_dir(self) -> Path:
        """The folder of downloaded models."""
        return self.cache_dir / "weights"

    @property
    def log_file(self) -> Path:
        """The log file."""
        return self.cache_dir / "logs" / "tandem.log"


def load(
    flags: Mapping[str, Any] | None = None, environ: Mapping[str, str] = os.environ, *, with_keys: bool = False
) -> Settings:
    """Combine flags, environment and settings file.

    Args:
        flags: by the names of `VARIABLES`; `None` for flags that are not given.
        with_keys: whether API keys take the place of the password that another host than 127.0.0.1 needs.

    Raises:
        SettingsError: for an invalid value, with its source.
    """
    cache_dir = _cache_dir(environ)
    values = _from_file(cache_dir / "settings.json")
    values = _from_environment(environ, _SHARED_VARIABLES) | values | _from_environment(environ, VARIABLES)
    for name, value in (flags or {}).items():
        if value is not None:
            values[name] = (value, flag_of(name))
    settings = _validated(cache_dir, values)
    if settings.host not in LOOPBACK and settings.auth is None and not with_keys:
        raise SettingsError("settings.host_without_password", host=settings.host)
    if settings.share:
        check_share(settings)
    return settings


def is_address(enhancer: str) -> bool:
    """Return whether the setting `enhancer` is a server's address, and not the name or folder of a model."""
    return enhancer.lower().startswith(("http://", "https://"))


def split_command(text: str, *, windows: bool = sys.platform == "win32") -> list[str]:
    """Return the program and the arguments of a command, which no shell will read.

    Words are separated by spaces and quoted as in a POSIX shell. On Windows, only double quotes quote, and a backslash
    is an ordinary character.

    Raises:
        ValueError: if a quote is not closed, or there is no program.
    """
    words = shlex.shlex(text, posix=True, punctuation_chars=False)
    words.whitespace_split, words.commenters = True, ""
    if windows:
        words.quotes, words.escape = '"', ""
    command = list(words)
    if not command or not command[0]:
        raise ValueError
    return command


def _is_batch_file(program: Any, *, windows: bool = sys.platform == "win32") -> bool:
    """Return whether Windows would have cmd.exe read the arguments; it runs what follows an ampersand in one."""
    return windows and isinstance(program, str) and program.rstrip(" .").lower().endswith((".bat", ".cmd"))


def check_share(settings: Settings) -> None:
    """Check that the other settings allow a share link.

    Raises:
        SettingsError: if one does not.
    """
    if settings.host not in LOOPBACK:
        raise SettingsError("settings.share_with_host", host=settings.host)
    # HF_HUB_OFFLINE is about models alone.
    if settings.offline and settings.offline != _SHARED_VARIABLES["offline"]:
        raise SettingsError("settings.share_offline", offline=settings.offline)


def _from_environment(environ: Mapping[str, str], variables: Mapping[str, str]) -> dict[str, tuple[Any, str]]:
    values = {name: (value_of(variable, environ), variable) for name, variable in variables.items()}
    return {name: entry for name, entry in values.items() if entry[0]}


def flag_of(name: str) -> str:
    """Return the flag that sets a setting."""
    return {"browser": "--no-browser", "tensorrt": "--enable-tensorrt"}.get(name, f"--{name.replace('_', '-')}")


def tensorrt_from_flags(*, enable: bool, text_encoders: bool, transformer: bool) -> str | None:
    """Return the setting `tensorrt` for the launch flags: all parts or the named ones; `None` without a flag.

    Raises:
        SettingsError: if a part is named and TensorRT is not enabled.
    """
    flags = {"text-encoders": text_encoders, "transformer": transformer}
    named = [part for part, flag in flags.items() if flag]
    if named and not enable:
        raise SettingsError("settings.tensorrt_not_enabled", flag=f"--tensorrt-{named[0]}")
    return (",".join(named) or "all") if enable else None


def _cache_dir(environ: Mapping[str, str]) -> Path:
    value = environ.get(CACHE_VARIABLE)
    path = Path(value).expanduser() if value else ROOT / "Cache"
    try:
        path.mkdir(parents=True, exist_ok=True)
        if not value and sys.platform != "win32" and path.stat().st_uid == os.geteuid():
            # Earlier versions created it with the user's umask. A folder that the user chose may be shared on purpose.
            path.chmod(0o700)
    except (OSError, ValueError) as error:
        raise SettingsError(
            "settings.no_cache_folder",
            folder=path,
            error=getattr(error, "strerror", None) or str(error),
            variable=CACHE_VARIABLE,
        ) from error
    return path.resolve()


def _from_file(path: Path) -> dict[str, tuple[Any, str]]:
    try:
        values = read_json(path)
    except FileNotFoundError:
        return {}
    except PermissionError as error:
        raise SettingsError("settings.file_unreadable", file=path, variable=CACHE_VARIABLE) from error
    except (OSError, ValueError) as error:
        raise SettingsError("settings.file_invalid", file=path) from error
    unknown = sorted(set(values) - set(VARIABLES)) if isinstance(values, dict) else ["(not an object)"]
    if unknown:
        named = [shortened(name) for name in unknown[:_MOST_NAMED]]
        raise SettingsError("settings.unknown", file=path, unknown=named, known=list(VARIABLES))
    return {name: (value, str(path)) for name, value in values.items()}


def _validated(cache_dir: Path, entries: Mapping[str, tuple[Any, str]]) -> Settings:
    """Return the settings that values with their sources describe."""
    values = {name: value for name, (value, _) in entries.items()}
    sources = {name: source for name, (_, source) in entries.items()}
    try:
        return Settings.model_validate({"cache_dir": cache_dir, **values}, context=sources)
    except ValidationError as error:
        name = str(error.errors()[0]["loc"][0])
    most = [limit.le for limit in Settings.model_fields[name].metadata if hasattr(limit, "le")]
    raise SettingsError(
        _INVALID.get(name, "settings.empty"),
        name=name.replace("_", " "),
        source=sources[name],
        value="" if name in _SECRET else shortened(str(values[name])),
        most=most[0] if most else None,
        known=list(TENSORRT_PARTS),
    )


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
    if parts.scheme == "http" and host not in LOOPBACK:
        raise SettingsError("settings.hub_without_https", source=source, value=shortened(text), hub=HUB)
    return text
