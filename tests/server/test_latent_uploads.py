"""Files of latents are received in parts, checked, and kept under a free name."""

import io
import os
from pathlib import Path

import numpy as np
import pytest

from runtime.core.errors import InvalidRequestError
from runtime.server.gradio_requests import access, is_upload
from runtime.server.latent_uploads import save_part

UPLOAD = "0123456789abcdef"


def npy(value: float = 0.0) -> bytes:
    content = io.BytesIO()
    np.save(content, np.full((2, 8, 3, 4), value, "float32"))
    return content.getvalue()


def test_parts_become_a_file_under_a_free_name(tmp_path: Path) -> None:
    folder = tmp_path / "latents"
    # The second one has other content, the third one that of the first.
    for name, data in (("world.npy", npy()), ("world (2).npy", npy(1.0)), ("world.npy", npy())):
        assert save_part(folder, UPLOAD, 0, len(data), "world.npy", data[:100]) is None
        assert save_part(folder, UPLOAD, 100, len(data), "world.npy", data[100:]) == folder / name
        assert (folder / name).read_bytes() == data
    assert not list((folder / ".uploads").iterdir())


def test_bad_uploads_leave_nothing(tmp_path: Path) -> None:
    data = npy()

    def refused(code: str, offset: int, size: int, name: str = "world.npy", content: bytes = data) -> None:
        with pytest.raises(InvalidRequestError) as refusal:
            save_part(tmp_path, UPLOAD, offset, size, name, content)
        assert refusal.value.code == code
        assert not list(tmp_path.glob("*.npy")) and not list(tmp_path.glob(".uploads/*"))

    refused("latents.unknown_type", 0, len(data), "notes.txt")
    refused("latents.not_numpy", 0, 5, content=b"notes")
    refused("latents.cut_short", 0, len(data) - 1, content=data[:-1])
    refused("latents.upload_parts", 0, len(data) - 1)
    refused("latents.upload_parts", 100, len(data), content=data[100:])
    save_part(tmp_path, UPLOAD, 0, len(data), "world.npy", data[:100])
    refused("latents.upload_parts", 101, len(data), content=data[101:])
    refused("latents.upload_disk_full", 0, 1 << 60, content=data)
    # An upload that was given up is removed with a later one.
    save_part(tmp_path, "f" * 16, 0, len(data), "old.npy", data[:100])
    os.utime(tmp_path / ".uploads" / ("f" * 16), (1, 1))
    refused("latents.not_numpy", 0, 5, content=b"notes")


@pytest.mark.parametrize("upload", ["..", "", ".", "a/b", "A" * 16, "0" * 33])
def test_an_upload_cannot_name_another_folder(upload: str, tmp_path: Path) -> None:
    (tmp_path / "kept.npy").write_bytes(npy())
    with pytest.raises(InvalidRequestError):
        save_part(tmp_path, upload, 0, 5, "world.npy", b"notes")
    assert [path.name for path in tmp_path.iterdir()] == ["kept.npy"]


def test_only_the_owner_uploads_latents() -> None:
    path = f"/tandem/latents/{UPLOAD}/0/12/my world.npy"
    assert access("POST", path) == "login" and is_upload(path)
    for method, other in (("GET", path), ("POST", path.replace("0123", "../.")), ("POST", f"{path}/x")):
        assert access(method, other) is None
    assert access("POST", path, visitors=True) is None
