"""Which pages and programs follow jobs. Their number is limited; the newest are kept."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from runtime.core.facts import Fact

# Of all users of a page together.
MOST_WATCHERS = 48


@dataclass(eq=False)
class Watch:
    """One page or program that follows a job.

    Attributes:
        session: of the page; empty for a program.
        ended: whether newer ones have taken its place.
        reason: why, as a fact for its user; `None` if the same page follows another job.
    """

    session: str = ""
    ended: bool = False
    reason: Fact | None = field(default=None, init=False)


class Watchers:
    """The pages and programs that follow jobs. For one event loop.

    A page follows one job. Beyond a limit, the oldest ends: of the same user, or, if all together are too many, of the
    user with the most.

    Args:
        each: maximum number of one user.
        most: maximum number of all users together.
    """

    def __init__(self, each: int, most: int = MOST_WATCHERS) -> None:
        self._most = most
        self._each = each
        self._users: dict[str, list[Watch]] = {}

    @contextmanager
    def watching(self, user: str, session: str = "") -> Iterator[Watch]:
        """Admit a page or program within a `with` block.

        Args:
            session: of a page; its earlier watch ends.
        """
        watch = Watch(session)
        watches = self._users.setdefault(user, [])
        watches.append(watch)
        for earlier in [entry for entry in watches if session and entry.session == session and entry is not watch]:
            self._end(user, earlier)
        if len(watches) > self._each:
            self._end(user, watches[0], self._each)
        if sum(map(len, self._users.values())) > self._most:
            largest = max(self._users, key=lambda name: len(self._users[name]))
            self._end(largest, self._users[largest][0], self._most)
        try:
            yield watch
        finally:
            if not watch.ended:
                self._end(user, watch)

    def _end(self, user: str, watch: Watch, maximum: int | None = None) -> None:
        watch.ended = True
        watch.reason = None if maximum is None else Fact("server.watch_ended", {"maximum": maximum})
        self._users[user].remove(watch)
        if not self._users[user]:
            del self._users[user]
