"""A relay before a server that can be cut, as a connection is when a laptop sleeps."""

import contextlib
import socket
import threading
import time


class Relay:
    """Passes connections on to a port of this machine until `cut`, and again after `mend`."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._open: list[socket.socket] = []
        self.port = 0
        self.mend()

    def mend(self) -> None:
        """Listen, on the same port each time."""
        self._listener = socket.create_server(("127.0.0.1", self.port))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    def cut(self) -> None:
        """Refuse new connections and break those there are."""
        for end in (self._listener, *self._open):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()
        self._open.clear()

    def _accept(self, listener: socket.socket) -> None:
        while listener.fileno() >= 0:
            try:
                near, _ = listener.accept()
            except OSError:  # closed, or no file descriptor is free
                time.sleep(0.1)
                continue
            try:
                far = socket.create_connection(("127.0.0.1", self._target))
            except OSError:
                near.close()
                continue
            self._open += [near, far]
            threading.Thread(target=self._relay, args=(near, far), daemon=True).start()

    def _relay(self, near: socket.socket, far: socket.socket) -> None:
        back = threading.Thread(target=_pass_on, args=(far, near), daemon=True)
        back.start()
        _pass_on(near, far)
        back.join()
        for end in (near, far):
            end.close()
            with contextlib.suppress(ValueError):  # cut meanwhile
                self._open.remove(end)


def _pass_on(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65_536):
            sink.sendall(data)
    # Also after a connection that was reset.
    with contextlib.suppress(OSError):
        sink.shutdown(socket.SHUT_WR)
