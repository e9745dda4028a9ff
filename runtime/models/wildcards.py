"""Lists for prompt templates: text files of the folder `wildcards` in the cache folder, one entry a line."""

from pathlib import Path

from runtime.core.errors import InvalidRequestError
from runtime.core.request import AUTO, GenerationRequest, random_seed
from runtime.core.templates import expanded, is_template

FOLDER = "wildcards"
_MAX_BYTES = 4 << 20


def with_prompt(request: GenerationRequest, cache_dir: Path | None) -> GenerationRequest:
    """Return a request whose template has become its prompt, with the seed that chose it; others are unchanged.

    A request that has a `template` already keeps its prompt.

    Args:
        cache_dir: with the lists; `None` has none.

    Raises:
        InvalidRequestError: for a list that cannot be read, see `core.templates.expanded`, or a prompt that is not
            valid.
    """
    if request.template is not None or not is_template(request.prompt):
        return request
    seed = random_seed() if request.seed == AUTO else request.seed
    prompt = expanded(request.prompt, seed, lambda name: _lines(cache_dir, name))
    return request.replace(prompt=prompt, template=request.prompt, seed=seed)


def _lines(cache_dir: Path | None, name: str) -> list[str]:
    """Return the entries of a list; lines that are empty or start with # are none.

    Args:
        name: without dots, as `core.templates` reads it, so that the file is inside the folder.
    """
    try:
        if cache_dir is None:
            raise FileNotFoundError
        with (cache_dir / FOLDER / f"{name}.txt").open("rb") as file:
            data = file.read(_MAX_BYTES + 1)
        text = data.decode("utf-8-sig")
    except FileNotFoundError as error:
        raise InvalidRequestError("prompt", "request.list_missing", name=name, folder=FOLDER) from error
    except (OSError, ValueError) as error:
        raise InvalidRequestError("prompt", "request.list_unreadable", name=name, folder=FOLDER) from error
    if len(data) > _MAX_BYTES:
        raise InvalidRequestError("prompt", "request.list_too_large", name=name, maximum=_MAX_BYTES)
    lines = [line for text_line in text.splitlines() if (line := text_line.strip()) and not line.startswith("#")]
    if not lines:
        raise InvalidRequestError("prompt", "request.list_empty", name=name, folder=FOLDER)
    return lines
