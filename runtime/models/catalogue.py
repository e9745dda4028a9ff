"""Which models there are: the shipped one, those in the cache's `weights` folder, and any folder by its path."""

from pathlib import Path

from runtime.core.errors import ModelError
from runtime.models.spec import ModelSpec
from runtime.models.wan import read_spec

EMBEDDED = Path(__file__).parent / "embedded"
SHIPPED = "diorama"


def folders(weights_dir: Path) -> dict[str, Path]:
    """Return the folder of each model by name, the shipped ones first."""
    found = {path.parent.name: path.parent for path in sorted(EMBEDDED.glob("*/model_index.json"))}
    for path in sorted(weights_dir.glob("*/model_index.json")):
        found.setdefault(path.parent.name, path.parent)
    return found


def find(name: str, weights_dir: Path) -> ModelSpec:
    """Return the model of that name, or in that folder.

    Raises:
        ModelError: if there is none, or it cannot be used.
    """
    known = folders(weights_dir)
    if name in known:
        return read_spec(known[name], name)
    directory = Path(name).expanduser()
    if directory.name == name and not directory.is_dir():
        raise ModelError(
            f"There is no model called {name!r}.", f"Take one of: {', '.join(known)}; or give a folder's path."
        )
    return read_spec(directory.resolve(), directory.resolve().name)
