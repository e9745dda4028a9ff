"""Files of latents: what is read, a few frames at a time, and what is refused before anything is computed."""

import io
import os
import pickle
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from runtime.core.errors import InvalidRequestError
from runtime.models.latent_files import LatentFile, parse_channels

SHAPE = (11, 8, 3, 4)


def values(*shape: int) -> np.ndarray:
    """Return latents."""
    return np.random.default_rng(3).standard_normal(shape).astype("float32")


def header(shape: tuple[int, ...], dtype: str = "<f4", *, padding: int = 0) -> bytes:
    """Return the header of an .npy file."""
    text = f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': {shape}, }}" + " " * padding + "\n"
    return b"\x93NUMPY\x02\x00" + struct.pack("<I", len(text)) + text.encode()


def saved(array: np.ndarray) -> bytes:
    """Return the bytes of an .npy file."""
    file = io.BytesIO()
    np.save(file, array, allow_pickle=True)
    return file.getvalue()


def magic(length: int) -> bytes:
    """Return the start of an .npy file, whose header has a length."""
    return b"\x93NUMPY\x02\x00" + struct.pack("<I", length)


GOOD = values(*SHAPE)
BAD_ARRAYS: dict[str, tuple[bytes, str, dict[str, Any]]] = {
    "cut": (saved(GOOD)[:-5], "cut_short", {"size": 4347, "needed": 4352}),
    "empty": (b"", "not_numpy", {}),
    "float64": (saved(GOOD.astype("float64")), "dtype", {"dtype": "float64"}),
    "int64": (saved(GOOD.astype("int64")), "dtype", {"dtype": "int64"}),
    "big-endian": (saved(GOOD.astype(">f4")), "dtype", {"dtype": ">f4"}),
    "no frames": (saved(GOOD[:0]), "none", {"shape": "0×8×3×4"}),
    "axes": (saved(GOOD[0]), "axes", {"shape": "8×3×4"}),
    "scalar": (saved(np.array(np.float32(3))), "axes", {"shape": "one value"}),
    "objects": (saved(np.array([{"a": 1}], dtype=object)), "pickled", {}),
    "pickle": (pickle.dumps(GOOD), "not_numpy", {}),
    "header": (header(SHAPE, padding=20_000) + GOOD.tobytes(), "not_numpy", {}),
    "nested": (magic(9_000) + b"(" * 9_000, "not_numpy", {}),
    "length": (magic(0xFFFFFFFF) + b"{", "not_numpy", {}),
    "negative": (header((-1, 8, 3, 4)), "none", {"shape": "-1×8×3×4"}),
    "terabytes": (header((10**9, 8, 3, 4)), "cut_short", {"size": 87, "needed": 384_000_000_087}),
    "fortran": (saved(np.asfortranarray(GOOD)), "fortran", {}),
}


def refusal(file: Path) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as refused, LatentFile(file):
        pass
    assert refused.value.field == "latents"
    assert "\n" not in refused.value.what + refused.value.remedy
    return refused.value


def test_bad_arrays_are_refused(tmp_path: Path, subtests: pytest.Subtests) -> None:
    file = tmp_path / "bad.npy"
    for name, (content, code, data) in BAD_ARRAYS.items():
        with subtests.test(msg=name):
            file.write_bytes(content)
            error = refusal(file)
            assert (error.code, error.data["file"]) == (f"latents.{code}", "bad.npy")
            assert {key: error.data[key] for key in data} == data


def test_bad_safetensors_are_refused(tmp_path: Path, subtests: pytest.Subtests) -> None:
    file = tmp_path / "bad.safetensors"
    cases: tuple[tuple[dict[str, torch.Tensor], str, dict[str, Any]], ...] = (
        ({"latents": torch.zeros(4, 8, 3, 4, dtype=torch.float64)}, "dtype", {"dtype": "F64"}),
        ({"a": torch.zeros(4, 8, 3, 4), "b": torch.zeros(1)}, "which_tensor", {"count": 2}),
        ({"latents": torch.zeros(0, 8, 3, 4)}, "none", {"shape": "0×8×3×4"}),
        ({"latents": torch.zeros(4, 8, 3)}, "axes", {"shape": "4×8×3"}),
    )
    for tensors, code, data in cases:
        with subtests.test(msg=code):
            save_file(tensors, file)
            error = refusal(file)
            assert error.code == f"latents.{code}"
            assert {key: error.data[key] for key in data} == data
    save_file({"latents": torch.zeros(4, 8, 3, 4)}, file)
    with LatentFile(file) as good:
        assert good.shape == (4, 8, 3, 4)
    whole = file.read_bytes()
    for damaged in (whole[:-1], whole[:20], b"", (1 << 62).to_bytes(8, "little") + whole[8:]):
        with subtests.test(msg=f"{len(damaged)} bytes"):
            file.write_bytes(damaged)
            error = refusal(file)
            assert (error.code, error.data["cause"].code) == ("latents.file_invalid", "model.file_damaged")


def test_what_is_no_file_of_latents_is_refused(tmp_path: Path, subtests: pytest.Subtests) -> None:
    makes: dict[str, tuple[Callable[[Path], object], str]] = {
        "z.pt": (lambda path: path.write_bytes(pickle.dumps(3)), "unknown_type"),
        "none.npy": (lambda path: None, "unreadable"),
        "folder": (lambda path: path.mkdir(), "unknown_type"),
        "folder.npy": (lambda path: path.mkdir(), "unreadable"),
        "pipe.npy": (os.mkfifo, "unreadable"),
        "pipe.safetensors": (os.mkfifo, "file_invalid"),
    }
    for name, (make, code) in makes.items():
        with subtests.test(msg=name):
            make(tmp_path / name)
            assert refusal(tmp_path / name).code == f"latents.{code}"


def test_channels_are_rgb_or_numbers() -> None:
    assert parse_channels("RGB, 3,0") == ("rgb", "3", "0")
    assert parse_channels(",".join(["rgb"] * 16)) == ("rgb",) * 16
    for text in ("depth", "", "rgb,", "-1", ",".join(["rgb"] * 17)):
        with pytest.raises(InvalidRequestError) as refused:
            parse_channels(text)
        assert (refused.value.field, refused.value.code) == ("channels", "latents.channels_invalid")
        assert (refused.value.data["value"], refused.value.data["most"]) == (text[:40], 16)


def test_memory_does_not_depend_on_the_length(tmp_path: Path) -> None:
    # 200 MB of latents of which two batches are read: a whole read would be seen.
    frames = 65_536
    with (tmp_path / "hour.npy").open("wb") as file:
        file.write(header((frames, 8, 10, 10)))
        file.truncate(file.tell() + frames * 8 * 10 * 10 * 4)
    with LatentFile(tmp_path / "hour.npy") as latents:
        tracemalloc.start()
        for start in (0, 32_768, frames - 8):
            assert latents.read([], start, start + 8).shape == (8, 8, 10, 10)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < 4 * 8 * 8 * 100 * 4
