"""Who has which GPU: each runner its own, until one whose job needs several has others lend it theirs.

A runner is named by its own GPU. One at a time gathers; whoever has nothing to do, or has done what it did, lends its
GPU then before it takes anything else, so that nobody waits for ever, and two who gather do not wait for each other.
What was lent stays with whoever has it as long as its processes are kept there, until somebody else needs it: one who
gathers, or its owner, who has a job and waits for it.
"""

import threading
from collections.abc import Callable, Sequence

_LOOK_SECONDS = 0.1


class Pool:
    """The GPUs that several runners share; safe between threads.

    Args:
        gpus: by index.
    """

    def __init__(self, gpus: Sequence[int]) -> None:
        self._holder = {gpu: gpu for gpu in gpus}
        self._gathers: int | None = None
        self._wanted = 0
        self._waits: set[int] = set()  # for their turn, and for their own GPU
        self._news = threading.Condition()

    def has(self, gpu: int) -> bool:
        """Whether a runner has its own GPU."""
        with self._news:
            return self._holder[gpu] == gpu

    def held(self, gpu: int) -> list[int]:
        """Return the GPUs that a runner has, its own first where it has that."""
        with self._news:
            return self._held(gpu)

    def asked(self, gpu: int) -> bool:
        """Whether a runner that does nothing is to give what it has to one that waits for it."""
        with self._news:
            held = self._held(gpu)
            return bool(held) and (self._lacks(gpu) or not self._waits.isdisjoint(set(held) - {gpu}))

    def lend(self, gpu: int) -> None:
        """Give what was lent to a runner back, and its own GPU to whoever gathers, if that still lacks one.

        Nothing of this process is on it any more.
        """
        with self._news:
            self._return(gpu)
            self._lend(gpu)
            self._news.notify_all()

    def release_cached_memory(self, gpu: int) -> None:
        """Give back all that was lent to a runner."""
        with self._news:
            self._return(gpu)
            self._news.notify_all()

    def gather(self, gpu: int, count: int, check: Callable[[], None]) -> list[int]:
        """Wait until a runner has so many GPUs, and return them, its own first; it gives back what it has beyond.

        Nothing of this process is on its own GPU: while somebody else gathers, that one may have it.

        Args:
            check: called ten times a second; what it raises ends the waiting, and nothing is held but its own then.
        """
        with self._news:
            try:
                self._await_turn(gpu, check)
                self._gathers, self._wanted = gpu, count
                while len(self._held(gpu)) < count:
                    self._wait(check)
            except BaseException:
                self._return(gpu)
                raise
            finally:
                if self._gathers == gpu:
                    self._gathers = None
                self._news.notify_all()
            for spare in self._held(gpu)[count:]:
                self._holder[spare] = spare
            return self._held(gpu)

    def _await_turn(self, gpu: int, check: Callable[[], None]) -> None:
        """Wait until nobody else gathers and a runner has its own GPU; lend that meanwhile."""
        self._waits.add(gpu)
        try:
            while self._gathers is not None or self._holder[gpu] != gpu:
                self._return(gpu)
                self._lend(gpu)
                self._news.notify_all()
                self._wait(check)
        finally:
            self._waits.remove(gpu)

    def _wait(self, check: Callable[[], None]) -> None:
        self._news.wait(_LOOK_SECONDS)
        check()

    def _lend(self, gpu: int) -> None:
        if self._gathers is not None and self._lacks(gpu) and self._holder[gpu] == gpu:
            self._holder[gpu] = self._gathers

    def _lacks(self, other_than: int) -> bool:
        gathers = self._gathers
        return gathers is not None and gathers != other_than and len(self._held(gathers)) < self._wanted

    def _held(self, gpu: int) -> list[int]:
        return sorted((one for one, holder in self._holder.items() if holder == gpu), key=lambda one: (one != gpu, one))

    def _return(self, gpu: int) -> None:
        for one, holder in self._holder.items():
            if holder == gpu:
                self._holder[one] = one
