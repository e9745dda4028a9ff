"""Files of results: written atomically, checked when read."""

import json
import os
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from runtime.core.errors import InvalidRequestError, OutputError


def new_folder(cache_dir: Path, out: str | None) -> Path:
    """Return the folder for a result, made if it is missing: the one that was asked for, else a new one in the cache.

    Raises:
        InvalidRequestError: if `out` names none.
        OutputError: if it cannot be made.
    """
    if out is None:
        now = datetime.now(timezone.utc).astimezone()
        folder = cache_dir / "bench" / f"{now:%Y%m%d-%H%M%S}-{os.getpid()}"
    elif not out.isprintable() or not out.strip():
        raise InvalidRequestError("out", "cli.folder_unreadable")
    else:
        folder = Path(out).expanduser().absolute()
    if folder.exists() and not folder.is_dir():
        raise InvalidRequestError("out", "bench.folder_is_file", folder=folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError("cli.folder_not_created", folder=folder, error=error.strerror or str(error)) from error
    return folder


def write(path: Path, text: str) -> None:
    """Write a file whole.

    Raises:
        OutputError: if it cannot be written.
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_text(text, encoding="utf-8")
        beside.replace(path)
    except OSError as error:
        raise OutputError("bench.not_written", file=path, error=error.strerror or str(error)) from error
    finally:
        beside.unlink(missing_ok=True)


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Write a result.

    Raises:
        OutputError: if it cannot be written.
    """
    write(path, json.dumps(values, indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def read_json(name: str) -> Any:
    """Read a file.

    Raises:
        InvalidRequestError: if it cannot be read, or is no JSON.
    """
    try:
        return json.loads(Path(name).expanduser().read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidRequestError("file", "bench.not_read", file=name, error=error.strerror or str(error)) from error
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError("file", "bench.not_json", file=name) from error
