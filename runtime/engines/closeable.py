"""What is closed where a `with` block ends."""

from abc import ABC, abstractmethod
from typing import TypeVar

Own = TypeVar("Own", bound="Closing")


class Closing(ABC):
    """A context manager that is closed at its end; or by `close`."""

    @abstractmethod
    def close(self) -> None:
        """Free everything."""

    def __enter__(self: Own) -> Own:
        """Return itself; leaving closes it."""
        return self

    def __exit__(self, *_: object) -> None:
        """Free everything."""
        self.close()
