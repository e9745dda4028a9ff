"""Files of gigabytes: read onto a device by several threads, also before they are asked for, and written in pieces.

On a GPU each thread reads a piece of the file into page-locked memory and copies it from there on a stream of its own.
Tensors that are mapped from a file and copied one by one, as libraries do, pass through pageable memory on one thread.
For a CPU tensors are mapped: those that are used as they are take no memory of their own.
"""

import json
import logging
import threading
from collections import deque
from collections.abc import Callable, Generator, Hashable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from runtime.core.errors import ModelError, first_line
from runtime.models.stored_weights import FileTensor
from runtime.models.tensor_files import unreadable

Key = TypeVar("Key", bound=Hashable)

logger = logging.getLogger(__name__)

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


class EarlyReads:
    """Reads tensors onto a device on threads before `stream_tensors` is asked for them, which then yields these.

    Use as a context manager: leaving it frees what was not asked for. One at a time.

    Args:
        find: yields the tensors and their devices, in the order in which they will be needed; called on a thread.
    """

    def __init__(self, find: Callable[[], Iterable[tuple[FileTensor, str]]]) -> None:
        self._find = find
        self._lock = threading.Lock()
        self._stopped = False
        self._begun: dict[tuple[FileTensor, torch.device], _Read] = {}
        # What was asked for, so that nothing is read twice.
        self._asked: set[tuple[FileTensor, torch.device]] = set()
        self._readers: dict[torch.device, _Reader] = {}
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="read-early")
        self._thread = threading.Thread(target=self._run, name="early-reads", daemon=True)

    def __enter__(self) -> "EarlyReads":
        """Begin."""
        _EARLY.append(self)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop."""
        self.discard()
        _EARLY.remove(self)
        self._thread.join()
        self._pool.shutdown()
        for reader in self._readers.values():
            reader.close()

    def take(self, stored: FileTensor, device: torch.device) -> "_Read | None":
        """Return a tensor that is being read, or was; `None` if it is not, and it will not be."""
        with self._lock:
            self._asked.add((stored, device))
            return self._begun.pop((stored, device), None)

    def discard(self) -> None:
        """Read no more, and free what was read."""
        with self._lock:
            self._stopped = True
            self._begun.clear()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _run(self) -> None:
        try:
            for stored, name in self._find():
                device = torch.device(name)
                with self._lock:
                    if self._stopped:
                        return
                    if (stored, device) not in self._asked and (stored, device) not in self._begun:
                        self._begun[stored, device] = self._begin(stored, device)
        except Exception as error:  # it is raised where the tensor is asked for
            logger.info("Weights could not be read early: %s", first_line(error))

    def _begin(self, stored: FileTensor, device: torch.device) -> "_Read":
        reader = self._readers.get(device)
        if reader is None:
            reader = self._readers[device] = _Reader(device, _PIECE_BYTES)
        made = _allocate(stored, device)
        return _Read(made, reader.submit(self._pool, made, stored))


# The one that reads, if any.
_EARLY: list[EarlyReads] = []


def discard_early_reads() -> None:
    """Free what was read early and not asked for; nothing more is."""
    for one in _EARLY:
        one.discard()


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
    waiting: deque[tuple[Key, _Read]] = deque()
    ahead = 0
    try:
        for key, stored in files.items():
            read = _EARLY[0].take(stored, target) if _EARLY else None
            if read is None:
                made = _allocate(stored, target)
                read = _Read(made, reader.submit(pool, made, stored))
            waiting.append((key, read))
            ahead += stored.nbytes
            while ahead > _AHEAD_BYTES:
                first, read = waiting.popleft()
                yield first, read.finished()
                ahead -= read.tensor.nbytes
        while waiting:
            first, read = waiting.popleft()
            yield first, read.finished()
    finally:
        pool.shutdown(cancel_futures=True)
        reader.close()


class _Read(NamedTuple):
    """A tensor that is being read."""

    tensor: torch.Tensor
    pieces: list[Future[None]]

    def finished(self) -> torch.Tensor:
        """Wait for it."""
        for piece in self.pieces:
            piece.result()
        return self.tensor


def _allocate(stored: FileTensor, device: torch.device) -> torch.Tensor:
    dtype = DTYPES.get(stored.dtype)
    shape = (stored.nbytes,) if dtype is None else stored.shape
    return torch.empty(shape, dtype=dtype or torch.uint8, device=device)


def _damaged(path: Path) -> ModelError:
    return ModelError("model.file_damaged", file=path.name, size=path.stat().st_size)


class _Reader:
    """Reads pieces of files into tensors; each thread has its own open file, page-locked memory and stream."""

    def __init__(self, device: torch.device, piece_bytes: int) -> None:
        self._device = device
        self._piece_bytes = piece_bytes
        self._own = threading.local()
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
        own = self._own
        if getattr(own, "path", None) != path:
            if hasattr(own, "file"):
                own.file.close()
            try:
                own.file, own.path = path.open("rb", buffering=0), path
            except OSError as error:
                raise unreadable(path, error) from error
            self._files.append(own.file)
        if ready is not None and not hasattr(own, "pinned"):
            own.pinned = torch.empty(self._piece_bytes, dtype=torch.uint8, pin_memory=True)
            own.stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]  # the same
        own.file.seek(offset)
        if ready is None:
            self._fill(target, own)
            return
        with torch.cuda.device(self._device), torch.cuda.stream(own.stream):
            source = own.pinned[: len(target)]
            self._fill(source, own)
            own.stream.wait_event(ready)
            target.copy_(source, non_blocking=True)
            own.stream.synchronize()

    def _fill(self, target: torch.Tensor, own: Any) -> None:
        view = target.numpy().data
        while view:
            count = own.file.readinto(view)
            if not count:
                raise _damaged(own.path)
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
