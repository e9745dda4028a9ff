"""The models: the one that ships with Tandem, those in the cache's `weights` folder, and any folder by its path.

Published models whose weights are not here can be planned with, but not run.
"""

from pathlib import Path

from runtime.core.errors import ModelError
from runtime.models.known import known_as, known_models, named
from runtime.models.registry import KnownModel, read_spec
from runtime.models.spec import ModelSpec

EMBEDDED = Path(__file__).parent / "embedded"
SHIPPED = "diorama"


def folders(weights_dir: Path) -> dict[str, Path]:
    """Return the folder of each model by name, shipped ones first, without incomplete downloads."""
    found = {path.parent.name: path.parent for path in sorted(EMBEDDED.glob("*/model_index.json"))}
    for path in sorted(weights_dir.glob("*/model_index.json")):
        if not path.parent.name.startswith("."):
            found.setdefault(path.parent.name, path.parent)
    return found


def find(name: str, weights_dir: Path) -> ModelSpec:
    """Return the model with a name, in any case, or in a folder. Its weights must be here.

    Raises:
        ModelError: if it does not exist, cannot be used, or its weights are not here.
    """
    spec = look_up(name, weights_dir)
    if not spec.here:
        known = known_as(name)
        repository = known.repository if known else spec.name
        raise ModelError(
            "model.weights_not_here", model=spec.title, name=spec.name, repository=repository, folder=weights_dir
        )
    return spec


def look_up(name: str, weights_dir: Path) -> ModelSpec:
    """Return the model with a name or in a folder, or a published one whose weights are not here.

    Raises:
        ModelError: if it does not exist or cannot be used.
    """
    here = folders(weights_dir)
    if name in here:
        return named(read_spec(here[name], name))
    directory = Path(name).expanduser()
    if directory.is_dir():
        return named(read_spec(directory.resolve(), directory.resolve().name))
    lowered = {other.lower(): other for other in reversed(here)}
    if name.lower() in lowered:
        found = lowered[name.lower()]
        return named(read_spec(here[found], found))
    known = known_as(name)
    if known is not None:
        found = _folder_of(known, here)
        return named(read_spec(here[found], found)) if found else known.spec(weights_dir)
    if directory.name == name:
        names = [*here, *(model.name for model in not_here(weights_dir))]
        raise ModelError("model.unknown", name=name, names=names)
    return read_spec(directory.resolve(), directory.resolve().name)


def not_here(weights_dir: Path) -> list[ModelSpec]:
    """Return the published models whose weights are not in `weights_dir`."""
    here = folders(weights_dir)
    return [known.spec(weights_dir) for known in known_models() if not _folder_of(known, here)]


def _folder_of(known: KnownModel, here: dict[str, Path]) -> str:
    return next((name for name in here if name.lower() in known.names), "")
