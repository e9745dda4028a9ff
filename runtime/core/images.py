"""The images that a video starts from and ends with, in requests and plans.

`models.images` finds and checks the files.
"""

from pathlib import Path
from typing import Any

from runtime.core.frozen import FrozenModel


class ImageUse(FrozenModel):
    """One image whose file was found and checked.

    Attributes:
        file: as requested.
        path: the copy of the file in the cache folder, which is named by the digest.
        digest: the file's SHA-256 in hexadecimal.
        width, height: of the upright image, in pixels.
    """

    file: str
    path: Path
    digest: str
    width: int
    height: int

    @property
    def name(self) -> str:
        """The name in messages."""
        return Path(self.file).name

    def summary(self) -> dict[str, Any]:
        """Return what results record of it, as JSON values: its name and digest, not its path."""
        return {"name": self.name, **self.model_dump(mode="json", exclude={"file", "path"})}
