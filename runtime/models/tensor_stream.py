"""Safetensors files of gigabytes: read onto a device by several threads, and written without blocking other threads.

On a GPU each thread reads a piece of the file into page-locked memory and copies it from there on a stream of its own.
Tensors that are mapped from a file and copied one by one, as libraries do, pass through pageable memory on one thread.
"""

import json
import threading
from collections import deque
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from runtime.core.errors import ModelError
from runtime.core.facts import Fact
from runtime.models.tensor_files import Header, StoredTensor, read_header

# torch's dtypes by safetensors' names.
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "BOOL": torch.bool, "U8": torch.uint8,
    "I8": torch.int8, "I16": torch.int16, "I32": torch.int32, "I64": torch.int64,
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_PIECE_BYTES = 16 << 20
# Tensors that were read and are not yet used, together.
_AHEAD_BYTES = 256 << 20
_THREADS = 8
_LENGTH_BYTES = 8


def stream_tensors(
    path: Path, device: str | torch.device, threads: int = _THREADS, piece_bytes: int = _PIECE_BYTES
) -> Generator[tuple[str, torch.Tensor], None, None]:
    """Yield every tensor of a file with its name, in the order of the file.

    Args:
        device: where the tensors are; each has memory of its own.
        threads: that read.
        piece_bytes: that a thread reads at once.

    Raises:
        ModelError: if the file cannot be read, is truncated, breaks a rule of the format, or has a dtype that torch
            lacks.
    """
    header, target = read_header(path), torch.device(device)
    for name, tensor in header.tensors.items():
        if tensor.dtype not in DTYPES:
            cause = Fact("safetensors.dtype_unknown", {"tensor": name[:80], "dtype": tensor.dtype})
            raise ModelError("model.tensors_invalid", file=f"{path.parent.name}/{path.name}", cause=cause)
    reader = _Reader(path, target, piece_bytes)
    pool = ThreadPoolExecutor(threads, thread_name_prefix="read-tensors")
    waiting: deque[tuple[str, torch.Tensor, list[Future[None]]]] = deque()
    ahead = 0
    try:
        for name, stored in header.tensors.items():
            made = torch.empty(stored.shape, dtype=DTYPES[stored.dtype], device=target)
            waiting.append((name, made, reader.submit(pool, made, header, stored)))
            ahead += made.nbytes
            while ahead > _AHEAD_BYTES:
                yield _finished(*waiting[0])
                ahead -= waiting.popleft()[1].nbytes
        while waiting:
            yield _finished(*waiting.popleft())
    finally:
        pool.shutdown(cancel_futures=True)
        reader.close()


def _finished(name: str, tensor: torch.Tensor, pieces: list[Future[None]]) -> tuple[str, torch.Tensor]:
    for piece in pieces:
        piece.result()
    return name, tensor


class _Reader:
    """Reads pieces of a file into tensors; each thread has its own file, page-locked memory and stream."""

    def __init__(self, path: Path, device: torch.device, piece_bytes: int) -> None:
        self._path = path
        self._device = device
        self._piece_bytes = piece_bytes
        self._own = threading.local()
        self._files: list[Any] = []

    def submit(
        self, pool: ThreadPoolExecutor, tensor: torch.Tensor, header: Header, stored: StoredTensor
    ) -> list[Future[None]]:
        """Let the pool read a tensor, in pieces."""
        ready = None
        if self._device.type == "cuda":
            # The memory may still be in use by kernels that were launched before.
            ready = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch has no annotation
            ready.record(torch.cuda.current_stream(self._device))
        data, start = tensor.reshape(-1).view(torch.uint8), header.start + stored.data_offsets[0]
        return [
            pool.submit(self._read, data[first : first + self._piece_bytes], start + first, ready)
            for first in range(0, len(data), self._piece_bytes)
        ]

    def close(self) -> None:
        """Close the files; no thread reads any more."""
        for file in self._files:
            file.close()

    @torch.no_grad()
    def _read(self, target: torch.Tensor, offset: int, ready: "torch.cuda.Event | None") -> None:
        own = self._own
        if not hasattr(own, "file"):
            own.file = self._path.open("rb", buffering=0)
            self._files.append(own.file)
            if ready is not None:
                own.pinned = torch.empty(self._piece_bytes, dtype=torch.uint8, pin_memory=True)
                own.stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]  # the same
        own.file.seek(offset)
        if ready is None:
            self._fill(target, own.file)
            return
        with torch.cuda.device(self._device), torch.cuda.stream(own.stream):
            source = own.pinned[: len(target)]
            self._fill(source, own.file)
            own.stream.wait_event(ready)
            target.copy_(source, non_blocking=True)
            own.stream.synchronize()

    def _fill(self, target: torch.Tensor, file: Any) -> None:
        view = target.numpy().data
        while view:
            count = file.readinto(view)
            if not count:
                name = f"{self._path.parent.name}/{self._path.name}"
                raise ModelError("model.file_damaged", file=name, size=self._path.stat().st_size)
            view = view[count:]


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
            left = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data
            while left:
                if stopped():
                    return False
                left = left[file.write(left[:_PIECE_BYTES]) :]
    return True


def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """Return a checksum of a tensor's bytes, (), int64, on its device: their sum as integers of 8 bytes, wrapped.

    Args:
        tensor: dense, with memory of its own.
    """
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    whole = len(data) // _LENGTH_BYTES * _LENGTH_BYTES
    return data[:whole].view(torch.int64).sum() + data[whole:].sum(dtype=torch.int64)
