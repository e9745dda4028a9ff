"""The cache of quantized weights and the files it consists of. The libraries' formats: `test_quantization`."""

import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import safetensors.torch
import torch

from runtime.core.errors import ModelError
from runtime.core.plan import ComponentPlan
from runtime.models import quantization, quantized_cache, weights
from runtime.models.quantized_cache import QuantizedCache, quantized_key
from runtime.models.spec import ModelSpec
from runtime.models.stored_weights import file_tensors
from runtime.models.tensor_stream import checksum, stream_tensors, write_tensors
from runtime.models.weights import load_module

TENSORS = {
    "matrix": torch.randn(70, 9).bfloat16(),
    "scale": torch.tensor(3.0),
    "bytes": torch.arange(13, dtype=torch.uint8),
    "fp8": torch.randn(16, 16).to(torch.float8_e4m3fn),
    "empty": torch.empty(0, 4),
}


class Space(NamedTuple):
    """Free memory, as psutil returns it."""

    available: int


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether all bytes and the form are equal."""
    flat = [tensor.reshape(-1).view(torch.uint8) for tensor in (one, other)]
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(*flat)


def module(seed: int = 0) -> torch.nn.Module:
    """Return a small module with a buffer that is in no file."""
    torch.manual_seed(seed)
    made = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8))
    made[0].register_buffer("table", torch.randn(3), persistent=False)
    return made


def empty() -> torch.nn.Module:
    """Return the same without memory."""
    return module().to("meta")


def key(name: str) -> dict[str, Any]:
    """Return a key."""
    return {"name": name, "quantization": "fp8", "dtype": "torch.bfloat16"}


def test_files_are_written_as_safetensors_and_read_in_pieces_by_threads(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    assert write_tensors(path, TENSORS)
    library = safetensors.torch.load_file(path)
    ours = dict(stream_tensors(file_tensors(path), "cpu", threads=3, piece_bytes=64))
    assert list(ours) == list(TENSORS)
    assert all(same(ours[name], tensor) and same(library[name], tensor) for name, tensor in TENSORS.items())


def test_writing_can_be_stopped_and_reading_ends_its_threads(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    assert not write_tensors(path, TENSORS, lambda: True)
    assert write_tensors(path, TENSORS)
    files = file_tensors(path)
    stream = stream_tensors(files, "cpu", threads=2, piece_bytes=8)
    next(stream)
    stream.close()
    assert not any(thread.name.startswith("read-tensors") for thread in threading.enumerate())
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ModelError):
        list(stream_tensors(files, "cpu"))


@pytest.mark.parametrize("byte", [0, 7, 1000, 1259])
def test_a_checksum_depends_on_every_byte(byte: int) -> None:
    data = TENSORS["matrix"].clone()
    data.reshape(-1).view(torch.uint8)[byte] ^= 64
    assert checksum(data) != checksum(TENSORS["matrix"])


def test_a_module_is_found_again_by_its_key_only(tmp_path: Path) -> None:
    cache = QuantizedCache(tmp_path)
    cache.keep(key("a"), module())
    cache.finish(30)
    assert cache.read(key("b"), empty, "cpu") is None
    found = QuantizedCache(tmp_path, writes=False).read(key("a"), empty, "cpu")
    assert found is not None
    wanted = dict(module().named_parameters()) | dict(module().named_buffers())
    assert all(same(tensor, wanted.pop(name)) for name, tensor in (*found.named_parameters(), *found.named_buffers()))
    assert not wanted
    assert [path.suffix for path in tmp_path.iterdir()] == [""], "locks and partial entries are removed"


def test_the_least_recently_used_entries_are_removed_beyond_the_limit(tmp_path: Path) -> None:
    for name in "ab":
        cache = QuantizedCache(tmp_path, 2600)
        cache.keep(key(name), module())
        cache.finish(30)
    assert QuantizedCache(tmp_path).read(key("a"), empty, "cpu") is not None
    cache = QuantizedCache(tmp_path, 2600)
    cache.keep(key("c"), module())
    cache.finish(30)
    assert [QuantizedCache(tmp_path).read(key(name), empty, "cpu") is not None for name in "abc"] == [True, False, True]


@pytest.mark.parametrize("lacks", ["disk", "memory", "writes"])
def test_nothing_is_written_where_space_is_short(lacks: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if lacks == "disk":
        monkeypatch.setattr(quantized_cache, "free_disk_bytes", lambda _: 1000)
    if lacks == "memory":
        monkeypatch.setattr("psutil.virtual_memory", lambda: Space(100))
    cache = QuantizedCache(tmp_path, writes=lacks != "writes")
    cache.keep(key("a"), module())
    cache.finish(30)
    assert not list(tmp_path.iterdir())


def test_a_failing_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> bool:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(quantized_cache, "write_tensors", full)
    cache = QuantizedCache(tmp_path)
    cache.keep(key("a"), module())
    cache.finish(30)
    assert not list(tmp_path.iterdir())


def spec(folder: Path, *files: Path, kept: tuple[str, ...] = ("proj_out",)) -> Any:
    """Return what keys depend on of a model's spec."""
    (folder / "transformer").mkdir(exist_ok=True)
    single = dict(zip(("transformer", "transformer_2"), files, strict=False))
    return SimpleNamespace(directory=folder, single_files=single, unquantized=kept)


PLAN = ComponentPlan(backend="pytorch", device="cpu", dtype="bfloat16", weights_bytes=0, reasons=(), quantization="fp8")


def test_weights_are_quantized_once(
    tiny: Callable[[str], ModelSpec], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library, which needs a GPU, is replaced by one that does not quantize."""
    loads: list[str] = []

    from_library = weights._from_library

    def load(spec: ModelSpec, name: str, dtype: torch.dtype, _: Any) -> Any:
        loads.append(name)
        return from_library(spec, name, dtype, {})

    monkeypatch.setattr(weights, "_from_library", load)
    monkeypatch.setattr(quantization, "loading_arguments", lambda *_: {"torch_dtype": torch.bfloat16})
    monkeypatch.setattr(quantization, "check_quantized", lambda *_: None)
    monkeypatch.setattr(quantized_cache, "prepare", lambda *_: None)
    monkeypatch.setattr(quantized_cache, "version", lambda _: "1")
    modules = []
    for expected in (1, 1, 2):
        cache = QuantizedCache(tmp_path / "quantized") if expected == 1 else None
        modules.append(load_module(tiny("wan2.1"), "transformer", PLAN.replace(quantization="bnb-4bit"), cache=cache))
        if cache is not None:
            cache.finish(30)
        assert len(loads) == expected
    first, *others = (module.state_dict() for module in modules)
    assert all(same(tensor, other[name]) for other in others for name, tensor in first.items())


def test_the_key_changes_with_files_and_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantized_cache, "version", lambda name: f"{name} 1")
    made = spec(tmp_path)
    (tmp_path / "transformer" / "x.safetensors").write_bytes(b"1")
    keys = [quantized_key(made, "transformer", PLAN, torch.bfloat16, tmp_path)]
    keys.append(quantized_key(spec(tmp_path, kept=()), "transformer", PLAN, torch.bfloat16, tmp_path))
    keys.append(quantized_key(made, "transformer", PLAN.replace(quantization="bnb-4bit"), torch.bfloat16, tmp_path))
    keys.append(quantized_key(made, "transformer", PLAN, torch.float16, tmp_path))
    (tmp_path / "transformer" / "x.safetensors").write_bytes(b"12")
    keys.append(quantized_key(made, "transformer", PLAN, torch.bfloat16, tmp_path))
    monkeypatch.setattr(quantized_cache, "version", lambda name: f"{name} 2")
    keys.append(quantized_key(made, "transformer", PLAN, torch.bfloat16, tmp_path))
    assert len({str(one) for one in keys}) == len(keys)


def test_single_files_are_known_by_their_digests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantized_cache, "version", lambda name: f"{name} 1")
    folder = tmp_path / "quantized"

    def start(path: Path) -> bool:
        """Return whether a start finds quantized weights; otherwise it adds them."""
        cache = QuantizedCache(folder)
        own = quantized_key(spec(tmp_path, path), "transformer", PLAN, torch.bfloat16, tmp_path)
        found = cache.read(own, empty, "cpu") is not None
        if not found:
            cache.keep(own, module())
        cache.finish(30)
        return found

    (tmp_path / "a.safetensors").write_bytes(b"1")
    assert [start(tmp_path / "a.safetensors") for _ in range(2)] == [False, True]
    # Renamed: its digest is read again, in the background, and the entry is that of before.
    (tmp_path / "a.safetensors").rename(tmp_path / "b.safetensors")
    assert [start(tmp_path / "b.safetensors") for _ in range(2)] == [False, True]
    assert len(list(folder.iterdir())) == 1
    (tmp_path / "b.safetensors").write_bytes(b"2")
    assert [start(tmp_path / "b.safetensors") for _ in range(2)] == [False, True]
    assert len(list(folder.iterdir())) == 2
