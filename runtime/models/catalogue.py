"""Which models there are: the shipped one, those in the cache's `weights` folder, and any folder by its path.

Beside these it knows published models whose weights are not here: they can be planned with, not run.
"""

from pathlib import Path

from runtime.core.errors import ModelError
from runtime.models.known import known_as, known_models, named
from runtime.models.registry import KnownModel, read_spec
from runtime.models.spec import ModelSpec

EMBEDDED = Path(__file__).parent / "embedded"
SHIPPED = "diorama"


def folders(weights_dir: Path) -> dict[str, Path]:
    """Return the folder of each model by name, the shipped ones first; one that is being fetched is not among them."""
    found = {path.parent.name: path.parent for path in sorted(EMBEDDED.glob("*/model_index.json"))}
    for path in sorted(weights_dir.glob("*/model_index.json")):
        if not path.parent.name.startswith("."):
            found.setdefault(path.parent.name, path.parent)
    return found


def find(name: str, weights_dir: Path) -> ModelSpec:
    """Return the model of that name, or in that folder, with its weights; upper and lower case are alike.

    Raises:
        ModelError: if there is none, it cannot be used, or its weights are not here.
    """
    spec = look_up(name, weights_dir)
    if not spec.here:
        known = known_as(name)
        raise ModelError(
            f"The weights of {spec.title} are not here.",
            f"Fetch them: models download {spec.name}. Or put the folder {known.repository if known else spec.name} of "
            f"huggingface.co into {weights_dir}, or give its path with --model.",
        )
    return spec


def look_up(name: str, weights_dir: Path) -> ModelSpec:
    """Return the model of that name, or in that folder, or a known one whose weights are not here.

    Raises:
        ModelError: if there is none, or it cannot be used.
    """
    at_hand = folders(weights_dir)
    if name in at_hand:
        return named(read_spec(at_hand[name], name))
    directory = Path(name).expanduser()
    if directory.is_dir():
        return named(read_spec(directory.resolve(), directory.resolve().name))
    lowered = {other.lower(): other for other in reversed(at_hand)}
    if name.lower() in lowered:
        found = lowered[name.lower()]
        return named(read_spec(at_hand[found], found))
    known = known_as(name)
    if known is not None:
        found = _folder_of(known, at_hand)
        return named(read_spec(at_hand[found], found)) if found else known.spec(weights_dir)
    if directory.name == name:
        names = [*at_hand, *(model.name for model in not_here(weights_dir))]
        raise ModelError(
            f"There is no model called {name!r}.", f"Take one of: {', '.join(names)}; or give a folder's path."
        )
    return read_spec(directory.resolve(), directory.resolve().name)


def not_here(weights_dir: Path) -> list[ModelSpec]:
    """Return the known models whose weights are not in `weights_dir`."""
    at_hand = folders(weights_dir)
    return [known.spec(weights_dir) for known in known_models() if not _folder_of(known, at_hand)]


def _folder_of(known: KnownModel, at_hand: dict[str, Path]) -> str:
    return next((name for name in at_hand if name.lower() in known.names), "")
