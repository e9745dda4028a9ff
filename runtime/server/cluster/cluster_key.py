"""The secret of a cluster: of the environment, or made once, in a file of the cache folder only for its owner.

Ray requires it for every connection (token authentication), and the head's HTTP API for `/v1/cluster`.
"""

import contextlib
import os
import re
import secrets
from collections.abc import Mapping
from pathlib import Path

from runtime.core.errors import SettingsError

NAME = "cluster.key"
VARIABLE = "TANDEM_CLUSTER_KEY"
_BYTES = 32
_KEY = re.compile(r"[0-9a-f]{64}")


def make_key(cache_dir: Path, environ: Mapping[str, str] = os.environ) -> str:
    """Return the head's key: of the environment, or else of the cache folder, where it is made if there is none.

    Raises:
        SettingsError: if it is no key, or cannot be read or written.
    """
    key = environ.get(VARIABLE, "").strip()
    if key:
        return _checked(key, VARIABLE)
    path = cache_dir / NAME
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            number = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(number, "w", encoding="ascii") as file:
                file.write(secrets.token_hex(_BYTES))
    except OSError as error:
        raise SettingsError("server.cluster_key_file", file=path, error=error.strerror or str(error)) from error
    return _read(path)


def given_key(cache_dir: Path, environ: Mapping[str, str] = os.environ) -> str:
    """Return the key of the cluster to join: of the environment, or else of the cache folder.

    Raises:
        SettingsError: if there is none, or it is no key.
    """
    key = environ.get(VARIABLE, "").strip()
    if key:
        return _checked(key, VARIABLE)
    if not (cache_dir / NAME).exists():
        raise SettingsError("server.cluster_key_missing", variable=VARIABLE)
    return _read(cache_dir / NAME)


def _read(path: Path) -> str:
    try:
        return _checked(path.read_text(encoding="ascii").strip(), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError("server.cluster_key_file", file=path, error=str(error)) from error


def _checked(key: str, source: str) -> str:
    if not _KEY.fullmatch(key):
        raise SettingsError("server.cluster_key_invalid", source=source)
    return key
