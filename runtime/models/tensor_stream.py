"""Files of gigabytes: read onto a device by several threads, copied from it, and written without blocking others.

On a GPU each thread reads a piece of the file into page-locked memory and copies it from there on a stream of its own.
Tensors that are mapped from a file and copied one by one, as libraries do, pass through pageable memory on one thread.
For a CPU tensors are mapped: those that are used as they are take no memory of their own.
"""

import json
import threading
from collections import deque
from collections.abc import Callable, Generator, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import torch

from runtime.core.errors import ModelError, first_line
from runtime.models.stored_weights import FileTensor
from runtime.models.tensor_files import unreadable

Key = TypeVar("Key", bound=Hashable)

# torch's dtypes by safetensors' names.
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu, "BOOL": torch.bool,
    "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "I32": torch.int32, "I64": torch.int64,
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_PIECE_BYTES = 16 << 20
# Tensors that were read and are not yet used, together.
_AHEAD_BYTES = 256 << 20
_THREADS = 8
_LENGTH_BYTES = 8


class MappedFiles(dict[Path, torch.Tensor]):
    """Files mapped into memory as bytes, each once."""

    def __missing__(self, path: Path) -> torch.Tensor:
        """Map a file; private, so that a change would not reach it."""
        self[path] = torch.from_file(str(path), shared=False, size=path.stat().st_size, dtype=torch.uint8)
        return self[path]

    def tensor(self, tensor: FileTensor) -> torch.Tensor:
        """Return a tensor; that of GGUF's blocks as bytes, flat.

        Raises:
            ModelError: if the file cannot be read, or became shorter.
        """
        try:
            whole = self[tensor.path]
        except (OSError, RuntimeError) as error:
            file, reason = tensor.path.name, first_line(error)
            raise ModelError("model.file_unreadable", file=file, path=tensor.path, reason=reason) from error
        data = whole[tensor.offset : tensor.offset + tensor.nbytes]
        if len(data) < tensor.nbytes:
            raise _damaged(tensor.path)
        dtype = DTYPES.get(tensor.dtype)
        if dtype is None:
            return data
        aligned = data.clone() if tensor.offset % dtype.itemsize else data
        return aligned.view(dtype).reshape(tensor.shape)


def read_tensors(files: Mapping[Key, FileTensor], device: str | torch.device) -> Iterator[tuple[Key, torch.Tensor]]:
    """Yield tensors with their keys, in the order given: mapped on a CPU, else streamed; see `stream_tensors`."""
    if torch.device(device).type != "cpu":
        yield from stream_tensors(files, device)
        return
    mapped = MappedFiles()
    for key, tensor in files.items():
        yield key, mapped.tensor(tensor)


def stream_tensors(
    files: Mapping[Key, FileTensor],
    device: str | torch.device,
    threads: int = _THREADS,
    piece_bytes: int = _PIECE_BYTES,
) -> Generator[tuple[Key, torch.Tensor], None, None]:
    """Yield tensors with their keys, in the order given.

    Args:
        files: best in the order of files and of their data. Tensors of types that torch lacks are read as bytes, flat.
        device: where the tensors are; each has memory of its own.
        threads: that read.
        piece_bytes: that a thread reads at once.

    Raises:
        ModelError: if a file cannot be read, or is shorter than it was.
    """
    target = torch.device(device)
    reader = _Reader(target, piece_bytes)
    pool = ThreadPoolExecutor(threads, thread_name_prefix="read-tensors")
    waiting: deque[tuple[Key, torch.Tensor, list[Future[None]]]] = deque()
    ahead = 0
    try:
        for key, stored in files.items():
            dtype = DTYPES.get(stored.dtype)
            shape = (stored.nbytes,) if dtype is None else stored.shape
            tensor = torch.empty(shape, dtype=dtype or torch.uint8, device=target)
            waiting.append((key, tensor, reader.submit(pool, tensor, stored)))
            ahead += tensor.nbytes
            while ahead > _AHEAD_BYTES:
                yield _finished(*waiting[0])
                ahead -= waiting.popleft()[1].nbytes
        while waiting:
            yield _finished(*waiting.popleft())
    finally:
        pool.shutdown(cancel_futures=True)
        reader.close()


def _finished(key: Key, tensor: torch.Tensor, pieces: list[Future[None]]) -> tuple[Key, torch.Tensor]:
    for piece in pieces:
        piece.result()
    return key, tensor


def _damaged(path: Path) -> ModelError:
    return ModelError("model.file_damaged", file=path.name, size=path.stat().st_size)


class _Reader:
    """Reads pieces of files into tensors; each thread has its own open file, page-locked memory and stream."""

    def __init__(self, device: torch.device, piece_bytes: int) -> None:
        self._device = device
        self._piece_bytes = piece_bytes
        self._local = threading.local()
        self._files: list[Any] = []

    def submit(self, pool: ThreadPoolExecutor, tensor: torch.Tensor, stored: FileTensor) -> list[Future[None]]:
        """Let the pool read a tensor, in pieces."""
        ready = None
        if self._device.type == "cuda":
            # The memory may still be in use by kernels that were launched before.
            ready = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch has no annotation
            ready.record(torch.cuda.current_stream(self._device))
        data = tensor.reshape(-1).view(torch.uint8)
        return [
            pool.submit(self._read, data[first : first + self._piece_bytes], stored.path, stored.offset + first, ready)
            for first in range(0, len(data), self._piece_bytes)
        ]

    def close(self) -> None:
        """Close the files; no thread reads any more."""
        for file in self._files:
            file.close()

    @torch.no_grad()
    def _read(self, target: torch.Tensor, path: Path, offset: int, ready: "torch.cuda.Event | None") -> None:
        local = self._local
        if getattr(local, "path", None) != path:
            if hasattr(local, "file"):
                local.file.close()
            try:
                local.file, local.path = path.open("rb", buffering=0), path
            except OSError as error:
                raise unreadable(path, error) from error
            self._files.append(local.file)
        if ready is not None and not hasattr(local, "pinned"):
            local.pinned = torch.empty(self._piece_bytes, dtype=torch.uint8, pin_memory=True)
            local.stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]  # the same
        local.file.seek(offset)
        if ready is None:
            self._fill(target, local)
            return
        with torch.cuda.device(self._device), torch.cuda.stream(local.stream):
            source = local.pinned[: len(target)]
            self._fill(source, local)
            local.stream.wait_event(ready)
            target.copy_(source, non_blocking=True)
            local.stream.synchronize()

    def _fill(self, target: torch.Tensor, local: Any) -> None:
        view = target.numpy().data
        while view:
            count = local.file.readinto(view)
            if not count:
                raise _damaged(local.path)
            view = view[count:]


def copies_in_memory(tensors: Sequence[torch.Tensor], threads: int = _THREADS) -> list[torch.Tensor]:
    """Return contiguous copies on the CPU, in the order given.

    Those of a GPU are copied by several threads through page-locked memory, each on a stream of its own: on the current
    stream, each copy would wait for all kernels that other threads have queued there, and those for the copy.

    Args:
        tensors: dense, and not changed until this returns.
    """
    on_gpu = [tensor for tensor in tensors if tensor.is_cuda]
    if not on_gpu:
        return [tensor.detach().clone(memory_format=torch.contiguous_format) for tensor in tensors]
    ready = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch has no annotation
    ready.record(torch.cuda.current_stream(on_gpu[0].device))
    local = threading.local()

    @torch.no_grad()
    def copied(tensor: torch.Tensor) -> torch.Tensor:
        target = torch.empty(tensor.shape, dtype=tensor.dtype)
        if not tensor.is_cuda:
            return target.copy_(tensor)
        if not hasattr(local, "stream"):
            local.stream = torch.cuda.Stream(tensor.device)  # type: ignore[no-untyped-call]  # the same
            local.pinned = torch.empty(_PIECE_BYTES, dtype=torch.uint8, pin_memory=True)
            local.stream.wait_event(ready)
        with torch.cuda.device(tensor.device), torch.cuda.stream(local.stream):
            source = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
            data = target.reshape(-1).view(torch.uint8)
            for first in range(0, len(source), _PIECE_BYTES):
                piece = source[first : first + _PIECE_BYTES]
                local.pinned[: len(piece)].copy_(piece, non_blocking=True)
                local.stream.synchronize()
                data[first : first + len(piece)].copy_(local.pinned[: len(piece)])
        return target

    with ThreadPoolExecutor(threads, thread_name_prefix="copy-tensors") as pool:
        return list(pool.map(copied, tensors))


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor], stopped: Callable[[], bool] = lambda: False) -> bool:
    """Write a safetensors file in pieces, between which other threads run; return whether it is complete.

    Args:
        tensors: dense, on the CPU.
        stopped: asked before each piece.

    Raises:
        OSError: if it cannot be written.
    """
    entries: dict[str, Any] = {}
    end = 0
    for name, tensor in tensors.items():
        entries[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [end, end + tensor.nbytes],
        }
        end += tensor.nbytes
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % _LENGTH_BYTES)
    with path.open("wb", buffering=0) as file:
        file.write(len(header).to_bytes(_LENGTH_BYTES, "little") + header)
        for tensor in tensors.values():
            data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data
            while data:
                if stopped():
                    return False
                data = data[file.write(data[:_PIECE_BYTES]) :]
    return True


def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """Return a checksum of a tensor's bytes, (), int64, on its device: their sum as integers of 8 bytes, wrapped.

    Args:
        tensor: dense, with memory of its own.
    """
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    whole = len(data) // _LENGTH_BYTES * _LENGTH_BYTES
    return data[:whole].view(torch.int64).sum() + data[whole:].sum(dtype=torch.int64)
