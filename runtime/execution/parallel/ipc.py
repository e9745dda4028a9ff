"""Messages between the process that leads and those of the GPUs: JSON and tensors, over a pair of sockets.

A message is the length of its JSON (4 bytes), the JSON, and the bytes of each tensor that the JSON describes.
"""

import contextlib
import json
import socket
import struct
import threading
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

_LENGTH = struct.Struct("!I")


class Message(NamedTuple):
    """What was said, and the tensors that go with it, on the CPU."""

    said: dict[str, Any]
    tensors: list[torch.Tensor]


class Wire:
    """One end of a pair of sockets; several threads may send, one receives."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._lock = threading.Lock()

    def be_patient(self, seconds: float) -> None:
        """Have `send` raise `BlockingIOError` where the other end takes nothing for so long, whole seconds."""
        self._end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(seconds), 0))

    def send(self, said: Mapping[str, Any], tensors: Sequence[torch.Tensor] = ()) -> None:
        """Send a message.

        Args:
            said: JSON values.
            tensors: dense, of any dtype, shape and device.

        Raises:
            OSError: if the other end is gone.
            BlockingIOError: see `be_patient`; nothing more can be sent then.
        """
        here = [tensor.detach().cpu().contiguous() for tensor in tensors]
        shown = [[str(tensor.dtype).removeprefix("torch."), list(tensor.shape)] for tensor in here]
        text = json.dumps({"said": dict(said), "tensors": shown}).encode()
        with self._lock:
            self._end.sendall(_LENGTH.pack(len(text)) + text)
            for tensor in here:
                self._end.sendall(tensor.reshape(-1).view(torch.uint8).numpy().data)

    def receive(self) -> Message | None:
        """Return the next message, or `None` if the other end is gone."""
        try:
            (length,) = _LENGTH.unpack(self._read(_LENGTH.size))
            read = json.loads(self._read(length))
            tensors = [self._tensor(getattr(torch, dtype), shape) for dtype, shape in read["tensors"]]
        except (OSError, EOFError):
            return None
        return Message(read["said"], tensors)

    def close(self) -> None:
        """Close this end: a thread that receives is given `None`."""
        with contextlib.suppress(OSError):  # the other end was first
            self._end.shutdown(socket.SHUT_RDWR)
        self._end.close()

    def _tensor(self, dtype: torch.dtype, shape: list[int]) -> torch.Tensor:
        tensor = torch.empty(shape, dtype=dtype)
        self._fill(tensor.reshape(-1).view(torch.uint8).numpy().data)
        return tensor

    def _read(self, size: int) -> bytearray:
        data = bytearray(size)
        self._fill(memoryview(data))
        return data

    def _fill(self, room: memoryview) -> None:
        while room:
            got = self._end.recv_into(room)
            if not got:
                raise EOFError
            room = room[got:]
