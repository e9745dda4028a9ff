"""Keys of the HTTP API: a file in the cache folder with each key's name, SHA-256 and limits.

A key is 32 random bytes, so a plain hash does not help to guess it. It is shown once, when it is made. As long as the
file exists, every request needs a key, also if all keys were revoked. The videos of a key belong to its name: a new key
with the name of a revoked one sees the same videos.
"""

import hashlib
import hmac
import re
import secrets
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError

from runtime.core.errors import SettingsError
from runtime.core.facts import shortened
from runtime.core.files import replace_file
from runtime.core.frozen import FrozenModel
from runtime.core.locks import held
from runtime.core.request import MAX_FRAMES, MAX_SIDE, MAX_STEPS
from runtime.core.untrusted_files import read_json

NAME = "api_keys.json"
# Of the owners of keys' videos, before the key's name.
OWNER_PREFIX = "key:"
_PREFIX = "tandem_"
_BYTES = 32
_KEY_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,39}")
_LOCK_SECONDS = 10.0


class KeyLimits(FrozenModel):
    """What a key allows.

    Attributes:
        videos: maximum number of queued and running videos.
        per_hour: maximum number of videos that may be created in an hour.
        frames, steps, pixels: maximum per video; `None` for what the model supports. Pixels are width times height.
    """

    videos: int = Field(default=10, ge=1, le=10_000)
    per_hour: int = Field(default=100, ge=1, le=100_000)
    frames: int | None = Field(default=None, ge=1, le=MAX_FRAMES)
    steps: int | None = Field(default=None, ge=1, le=MAX_STEPS)
    pixels: int | None = Field(default=None, ge=1, le=MAX_SIDE**2)


class ApiKey(FrozenModel):
    """One key.

    Attributes:
        name: for people; unique.
        digest: SHA-256 of the key in hexadecimal.
        created: seconds since 1970.
    """

    name: Annotated[str, Field(pattern=rf"^{_KEY_NAME.pattern}$")]
    digest: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    created: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    limits: KeyLimits = KeyLimits()

    @property
    def owner(self) -> str:
        """The owner of its videos in the job store."""
        return f"{OWNER_PREFIX}{self.name}"


_KEYS: TypeAdapter[tuple[ApiKey, ...]] = TypeAdapter(tuple[ApiKey, ...])


class ApiKeys:
    """The keys of a cache folder. Safe between threads and processes.

    Raises:
        SettingsError: by any method, if the file cannot be read or written.
    """

    def __init__(self, cache_dir: Path) -> None:
        self._path = cache_dir / NAME
        self._lock = threading.Lock()
        self._read: tuple[object, Sequence[ApiKey] | None] = (object(), None)

    def keys(self) -> Sequence[ApiKey] | None:
        """Return the keys; `None` if none was ever added. Changes by other processes are seen at once."""
        with self._lock:
            try:
                stat = self._path.stat()
            except FileNotFoundError:
                return None
            except OSError as error:
                raise SettingsError("server.api_keys_unreadable", file=self._path) from error
            identity = (stat.st_ino, stat.st_mtime_ns, stat.st_size)
            if identity != self._read[0]:
                self._read = (identity, self._from_file())
            return self._read[1]

    def find(self, secret: str) -> ApiKey | None:
        """Return the key with this secret. The time that it takes does not depend on which key is similar."""
        digest = _digest(secret)
        matching = [key for key in self.keys() or () if hmac.compare_digest(key.digest, digest)]
        return matching[0] if matching else None

    def add(self, name: str, limits: KeyLimits) -> str:
        """Add a key; return its secret, which is not stored.

        Raises:
            SettingsError: also if the name is taken or cannot be used.
        """
        if not _KEY_NAME.fullmatch(name):
            raise SettingsError("server.api_key_name", name=shortened(name))
        secret = f"{_PREFIX}{secrets.token_urlsafe(_BYTES)}"
        with self._changing():
            keys = self.keys() or ()
            if any(key.name == name for key in keys):
                raise SettingsError("server.api_key_exists", name=name)
            self._write([*keys, ApiKey(name=name, digest=_digest(secret), created=time.time(), limits=limits)])
        return secret

    def revoke(self, name: str) -> None:
        """Remove a key; its videos stay.

        Raises:
            SettingsError: also if there is no such key.
        """
        with self._changing():
            keys = self.keys() or ()
            remaining = [key for key in keys if key.name != name]
            if len(remaining) == len(keys):
                raise SettingsError("server.api_key_unknown", name=shortened(name), known=[key.name for key in keys])
            self._write(remaining)

    def _changing(self) -> Any:
        return held(self._path.with_suffix(".lock"), seconds=_LOCK_SECONDS)

    def _from_file(self) -> Sequence[ApiKey]:
        try:
            return _KEYS.validate_python(read_json(self._path))
        except (OSError, ValueError, ValidationError) as error:
            raise SettingsError("server.api_keys_unreadable", file=self._path) from error

    def _write(self, keys: Sequence[ApiKey]) -> None:
        data = _KEYS.dump_json(tuple(keys), indent=2)
        try:
            replace_file(self._path, data, sync=True)
        except OSError as error:
            reason = error.strerror or str(error)
            raise SettingsError("server.api_keys_not_written", file=self._path, error=reason) from error


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).hexdigest()
