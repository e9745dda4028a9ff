"""Uploads of files of latents to the folder that the web app lists.

A file is sent in parts: it may be larger than the body of a request, and take longer than a request may.
"""

import asyncio
import filecmp
import re
import shutil
import time
from pathlib import Path

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from runtime.core.errors import InvalidRequestError, TandemError
from runtime.machine.probe import free_disk_bytes
from runtime.models.latent_files import LatentFile, check_suffix
from runtime.server.gradio_requests import LATENTS, RefusedError
from runtime.server.image_uploads import plain_name

# Each unfinished upload has a folder in this one, which is removed after a day.
_PARTIAL = ".uploads"
_KEPT_SECONDS = 86_400
_ID = re.compile(r"[0-9a-f]{1,32}")
# What stays free, for videos.
_SPARE_BYTES = 1 << 30


def routes(latents_dir: Path) -> list[BaseRoute]:
    """Return the route of the owner's page. The middleware has checked the login and the size of each part."""

    async def part(request: Request) -> Response:
        """Keep a part of a file; answer the last one with the name of the file."""
        path, data = request.path_params, await request.body()
        try:
            name = plain_name(path["name"])
            file = await asyncio.to_thread(
                save_part, latents_dir, path["upload"], path["offset"], path["size"], name, data
            )
        except TandemError as error:
            raise RefusedError(error.fact, text=f"{error.what} {error.remedy}".strip()) from error
        return JSONResponse({"file": "" if file is None else file.name}, headers={"Cache-Control": "no-store"})

    return [Route(f"{LATENTS}{{upload}}/{{offset:int}}/{{size:int}}/{{name}}", part, methods=["POST"])]


def save_part(folder: Path, upload: str, offset: int, size: int, name: str, data: bytes) -> Path | None:
    """Append a part to an upload; return the file, under a name that is free, once it is complete and can be read.

    Args:
        upload: names the upload, in hexadecimal digits.
        offset, size: of the part in the file, and of the file, in bytes.

    Raises:
        InvalidRequestError: if it is no file of latents, does not follow the part before it, or cannot be saved.
    """
    if not _ID.fullmatch(upload):  # else it could name another folder, which is removed below
        raise InvalidRequestError("latents", "latents.upload_parts", file=name)
    upload_dir = folder / _PARTIAL / upload
    partial = upload_dir / name
    try:
        if not offset:
            check_suffix(partial)
            _remove_old(folder / _PARTIAL)
            _check_space(folder, name, size)
            upload_dir.mkdir(parents=True, exist_ok=True)
        elif not partial.is_file():
            raise InvalidRequestError("latents", "latents.upload_parts", file=name)
        with partial.open("ab" if offset else "wb") as file:
            end = file.tell() + len(data)
            if file.tell() != offset or end > size:
                raise InvalidRequestError("latents", "latents.upload_parts", file=name)
            file.write(data)
        if end < size:
            return None
        with LatentFile(partial):
            pass
        file_path = _free_name(partial, folder / name)
        partial.replace(file_path)
    except OSError as error:
        shutil.rmtree(upload_dir, ignore_errors=True)
        raise InvalidRequestError(
            "latents", "latents.upload_unwritten", file=name, folder=folder, reason=error.strerror or str(error)
        ) from error
    except InvalidRequestError:
        shutil.rmtree(upload_dir, ignore_errors=True)
        raise
    shutil.rmtree(upload_dir, ignore_errors=True)
    return file_path


def _check_space(folder: Path, name: str, size: int) -> None:
    free = free_disk_bytes(folder)
    if size + _SPARE_BYTES > free:
        raise InvalidRequestError("latents", "latents.upload_disk_full", file=name, size=size, free=free, folder=folder)


def _remove_old(folder: Path) -> None:
    """Remove uploads that were given up."""
    for upload_dir in folder.glob("*"):
        if time.time() - upload_dir.stat().st_mtime > _KEPT_SECONDS:
            shutil.rmtree(upload_dir, ignore_errors=True)


def _free_name(partial: Path, path: Path) -> Path:
    """Return a path that does not exist, or has the same content: `path`, or one such as "world (2).npy"."""
    number, free = 1, path
    while free.exists() and not filecmp.cmp(partial, free, shallow=False):
        number += 1
        free = path.with_stem(f"{path.stem} ({number})")
    return free
