"""Quantized weights on disk: a later process loads them instead of quantizing the model's files again.

    <digest of the key>/
        manifest.json           the key, how each parameter is put together, a checksum of every tensor
        weights.safetensors     parameters and buffers, as they are after quantization, without LoRAs
    .writing-<random>/          an entry that is being written, with a lock; renamed when it is complete

The key has the model's files, the quantization, the versions of libraries, and the GPU. What is loaded is equal bit for
bit to what was quantized. An entry that does not match its manifest is removed, and reported.

Weights are copied to memory (RAM) once they are quantized, and written from there on a thread while the job runs: only
the end of the process waits for the disk. They are not cached if that would leave little memory or disk space.
"""

import contextlib
import hashlib
import json
import logging
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
import torch

from runtime.core.digests import file_digests, known_digests
from runtime.core.disk_caches import QUANTIZED, Entry, evict
from runtime.core.errors import first_line, ran_out
from runtime.core.facts import Fact
from runtime.core.locks import held, remove_scratch_folders, scratch_folder
from runtime.core.plan import ComponentPlan
from runtime.core.untrusted_files import parse_json, read_file
from runtime.machine.probe import free_disk_bytes
from runtime.models.quantization import is_quantized, package_of
from runtime.models.quantized_tensors import flatten, prepare, unflatten
from runtime.models.spec import ModelSpec, folder_of
from runtime.models.stored_weights import file_tensors
from runtime.models.tensor_stream import checksum, copies_in_memory, stream_tensors, write_tensors

# What stays free on the disk.
_FREE_DISK_BYTES = 20 * 10**9
# Copies are made only if this many times their size is free in memory (RAM).
_FREE_FACTOR = 1.5
_VERSION = 1
_MANIFEST, _WEIGHTS = "manifest.json", "weights.safetensors"
_MAX_MANIFEST_BYTES = 64 << 20
_MAX_MANIFEST_VALUES = 1_000_000
_WRITING, _LOCK = ".writing-", ".lock"
_LOCK_SECONDS = 10.0

Key = Mapping[str, Any]

logger = logging.getLogger(__name__)


def quantized_key(spec: ModelSpec, component: str, part: ComponentPlan, dtype: torch.dtype, cache_dir: Path) -> Key:
    """Return what the quantized weights of a component depend on.

    Of a model's folder, that is the sizes and times of its files; of single files, which people rename and move, their
    digests. Those are read on the thread that writes the weights, see `with_digests`.

    Args:
        part: with the quantization and the device.
        dtype: in which layers compute.
        cache_dir: has the digests of files, see `core.digests`.

    Raises:
        OSError: if the files cannot be read.
    """
    single_file = spec.single_files.get(component)
    files: dict[str, Any]
    if single_file is None:
        folder = spec.directory / folder_of(component)
        file_stats = [(path.name, path.stat()) for path in sorted(folder.iterdir()) if path.is_file()]
        files = {
            "folder": str(folder.resolve()),
            "files": [[name, stat.st_size, stat.st_mtime_ns] for name, stat in file_stats],
        }
    else:
        digests = known_digests([single_file], cache_dir)
        files = {"unread": str(single_file)} if digests is None else {"digests": digests}
    on_gpu = part.device.startswith("cuda")
    return {
        "version": _VERSION,
        **files,
        "quantization": part.quantization,
        "dtype": str(dtype),
        "kept": list(spec.unquantized),
        "libraries": {name: version(name) for name in ("torch", "diffusers", package_of(part.quantization))},
        "device": torch.cuda.get_device_name(part.device) if on_gpu else part.device,
    }


def with_digests(key: Key, cache_dir: Path) -> Key:
    """Return a key with the digests of files that were not known yet.

    Raises:
        OSError: if they cannot be read.
    """
    if "unread" not in key:
        return key
    digests = file_digests([Path(key["unread"])], cache_dir)
    return {name: value for name, value in key.items() if name != "unread"} | {"digests": digests}


class QuantizedCache:
    """Quantized weights in a folder that processes share.

    Args:
        folder: created with the first entry.
        max_bytes: limit for all entries together; the newest one is kept nevertheless.
        writes: whether weights are added.
    """

    def __init__(self, folder: Path, max_bytes: int = QUANTIZED.max_bytes, *, writes: bool = True) -> None:
        self.folder = folder
        self._max_bytes = max_bytes
        self._writes = writes
        self._writers: list[threading.Thread] = []
        self._stopped = threading.Event()
        self._reports: list[Fact] = []

    def take_reports(self) -> list[Fact]:
        """Return the entries found damaged since the last call."""
        reports, self._reports = self._reports, []
        return reports

    def read(self, key: Key, empty: Callable[[], torch.nn.Module], device: str) -> torch.nn.Module | None:
        """Return a module with cached weights on a device; `None` if there are none, or they were damaged.

        Args:
            empty: makes the module, with parameters on the meta device.

        Raises:
            Exception: if memory runs out.
        """
        entry = self.folder / _digest(key)
        if "unread" in key or not (entry / _MANIFEST).is_file():
            return None
        try:
            manifest = parse_json(read_file(entry / _MANIFEST, _MAX_MANIFEST_BYTES), max_values=_MAX_MANIFEST_VALUES)
            if manifest["key"] != key:
                raise ValueError("The entry has another key")
            module = _filled(empty(), manifest, entry / _WEIGHTS, device)
            (entry / _MANIFEST).touch()
        except Exception as error:  # damaged files lead to errors of any type
            if ran_out(error) is not None:
                raise
            logger.warning("Quantized weights in %s are damaged", entry, exc_info=error)
            self._reports.append(Fact("quantization.cache_damaged", {"folder": entry, "reason": first_line(error)}))
        else:
            return module
        shutil.rmtree(entry, ignore_errors=True)
        return None

    def keep(self, key: Key, module: torch.nn.Module) -> None:
        """Copy a module's weights to memory (RAM) and write them on a thread; what prevents it is logged.

        Args:
            module: quantized, without LoRAs, and not called yet.
        """
        if not self._writes:
            return
        try:
            size = sum(tensor.nbytes for tensor in _tensors(module, key["quantization"])[0].values())
            problem = self._no_space(size)
            if problem is not None:
                logger.info("Quantized weights are not cached: %s", problem)
                return
            manifest, copies = _copied(key, module)
        except Exception as error:  # the job needs no cache
            if ran_out(error) == "VRAM":
                raise
            logger.warning("Quantized weights are not cached", exc_info=error)
            return
        writer = threading.Thread(target=self._write, args=(manifest, copies), name="quantized-cache", daemon=True)
        self._writers = [thread for thread in self._writers if thread.is_alive()] + [writer]
        writer.start()

    def finish(self, seconds: float) -> None:
        """Wait until weights are written; those that take longer are not cached."""
        end = time.monotonic() + seconds
        for writer in self._writers:
            writer.join(max(end - time.monotonic(), 0))
        self._stopped.set()
        for writer in self._writers:
            writer.join(1)

    def _no_space(self, size: int) -> str | None:
        self.folder.mkdir(parents=True, exist_ok=True)
        if free_disk_bytes(self.folder) < size + _FREE_DISK_BYTES:
            return f"{size} bytes would leave little disk space"
        if psutil.virtual_memory().available < _FREE_FACTOR * size:
            return f"{size} bytes would leave little memory"
        return None

    def _write(self, manifest: dict[str, Any], copies: dict[str, torch.Tensor]) -> None:
        try:
            manifest["key"] = with_digests(manifest["key"], self.folder.parent)
            entry = self.folder / _digest(manifest["key"])
            remove_scratch_folders(self.folder, _WRITING)
            with held(self.folder / f".{entry.name}{_LOCK}", seconds=0), scratch_folder(self.folder, _WRITING) as new:
                draft = new / entry.name
                draft.mkdir()
                if entry.exists() or not write_tensors(draft / _WEIGHTS, copies, self._stopped.is_set):
                    return
                (draft / _MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")
                draft.rename(entry)
            with held(self.folder / _LOCK, seconds=_LOCK_SECONDS):
                self._evict(entry)
        except TimeoutError:
            logger.info("Another process writes quantized weights")
        except Exception as error:  # a full disk, for example: the next process quantizes again
            logger.warning("Quantized weights could not be cached: %s", first_line(error))

    def _evict(self, newest: Path) -> None:
        """Remove the least recently used entries beyond the limit."""
        entries = []
        for path in self.folder.glob(f"*/{_MANIFEST}"):
            with contextlib.suppress(OSError):
                size = sum(file.stat().st_size for file in path.parent.iterdir())
                entries.append(Entry(path.stat().st_mtime_ns, size, path.parent))
        evict(entries, self._max_bytes, keep=newest)


def _digest(key: Key) -> str:
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32]


def _tensors(module: torch.nn.Module, kind: str) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return a module's tensors by name, and how quantized parameters consist of them."""
    tensors: dict[str, torch.Tensor] = {}
    quantized = {}
    for name, parameter in module.named_parameters():
        if not is_quantized(parameter):
            tensors[name] = parameter.data
            continue
        parts, text = flatten(parameter, kind)
        quantized[name] = {"parts": list(parts), "text": text}
        tensors |= {f"{name}/{part}": tensor for part, tensor in parts.items()}
    return tensors | dict(module.named_buffers()), quantized


def _copied(key: Key, module: torch.nn.Module) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Return the manifest of a module's weights, and copies of them on the CPU."""
    with torch.no_grad():
        tensors, quantized = _tensors(module, key["quantization"])
        sums = _values([checksum(tensor) for tensor in tensors.values()])
        copies = copies_in_memory(list(tensors.values()))
    manifest = {"key": key, "quantized": quantized, "sums": dict(zip(tensors, sums, strict=True))}
    return manifest, dict(zip(tensors, copies, strict=True))


def _filled(module: torch.nn.Module, manifest: Mapping[str, Any], weights: Path, device: str) -> torch.nn.Module:
    """Return a module with the weights of an entry.

    Raises:
        Exception: of any type, if they are damaged.
    """
    key, quantized = manifest["key"], manifest["quantized"]
    prepare(module, key["quantization"], getattr(torch, key["dtype"].removeprefix("torch.")), list(quantized))
    parts: dict[str, dict[str, torch.Tensor]] = {name: {} for name in quantized}
    sums = {}
    with torch.no_grad():
        for name, tensor in stream_tensors(file_tensors(weights), device):
            sums[name] = checksum(tensor)
            owner, _, part = name.partition("/")
            if not part:
                _set(module, name, tensor)
                continue
            parts[owner][part] = tensor
            if len(parts[owner]) == len(quantized[owner]["parts"]):
                layer = module.get_submodule(owner.rpartition(".")[0])
                value = unflatten(parts.pop(owner), quantized[owner]["text"], key["quantization"], layer)
                setattr(layer, owner.rpartition(".")[2], value)
        if dict(zip(sums, _values(list(sums.values())), strict=True)) != manifest["sums"]:
            raise ValueError("Its tensors have other checksums")
    missing = [name for name, parameter in (*module.named_parameters(), *module.named_buffers()) if parameter.is_meta]
    if missing or parts:
        raise ValueError(f"It lacks {[*missing, *parts][0]}")
    return module


def _set(module: torch.nn.Module, name: str, tensor: torch.Tensor) -> None:
    """Set a parameter or buffer that is not quantized; its shape must be that of the module."""
    owner, _, last = name.rpartition(".")
    target: Any = module.get_submodule(owner)
    now = getattr(target, last)
    if now.shape != tensor.shape:
        raise ValueError(f"{name} has another shape")
    is_parameter = isinstance(now, torch.nn.Parameter)
    setattr(target, last, torch.nn.Parameter(tensor, requires_grad=False) if is_parameter else tensor)


def _values(sums: list[torch.Tensor]) -> list[int]:
    """Return the values of tensors (), int64, after one wait for the device."""
    return [int(value) for value in torch.stack(sums).tolist()] if sums else []
