"""The models that a page offers: those of the catalogue and the one that Tandem was started with, no other folder."""

from runtime.core.errors import ModelError, TandemError
from runtime.core.settings import Settings
from runtime.models.catalogue import find, folders
from runtime.models.spec import ModelSpec


def offered(settings: Settings) -> dict[str, ModelSpec]:
    """Return the usable models by name, starting with the one that Tandem was started with.

    Raises:
        ModelError: if that one cannot be used. Others that cannot be used are left out.
    """
    found = {settings.model: find(settings.model, settings.weights_dir)}
    for name in folders(settings.weights_dir):
        if name not in found:
            try:
                found[name] = find(name, settings.weights_dir)
            except TandemError:
                continue
    return found


def check_offered(name: object, models: dict[str, ModelSpec]) -> ModelSpec:
    """Return the model of that name.

    Raises:
        ModelError: if it is not offered; a page cannot open folders of its choice.
    """
    if isinstance(name, str) and name in models:
        return models[name]
    raise ModelError("server.model_not_offered", models=list(models))
