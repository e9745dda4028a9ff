"""The videos of `generate` with lists: prompts of a file, images of a folder, and a grid of values."""

from collections.abc import Sequence
from pathlib import Path

from runtime.cli.conversion import read_path
from runtime.cli.flags import Flags, request_from_flags
from runtime.core.batches import Changes, grid_of, read_axis
from runtime.core.environment import program
from runtime.core.errors import InvalidRequestError
from runtime.core.request import GenerationRequest

_IMAGES = frozenset({".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".avif"})
_MAX_BYTES = 16 << 20


def requests_of(
    flags: Flags, prompts: str | None, images_of: str | None, grid: Sequence[str], out: str | None
) -> list[GenerationRequest] | None:
    """Return the requests of a batch: each prompt with each image and each combination of the grid.

    Args:
        flags: of `generate`, see `request_from_flags`.
        prompts: a file with a prompt in each line; `None` for the prompt of `flags`.
        images_of: a folder with an image for each video; `None` for the one in `flags`.
        grid: see `core.batches.read_axis`.
        out: the file of one video.

    Returns:
        `None` if nothing was given that makes a batch.

    Raises:
        InvalidRequestError: for invalid values, or a file or folder that cannot be used.
    """
    axes = [read_axis(text) for text in grid]
    if prompts is None and not {"prompt", "settings_of"} & {*flags}:
        problem = "Missing argument 'PROMPT'."
        raise InvalidRequestError("prompt", "cli.usage", problem=problem, help=f"{program()} generate --help")
    if prompts is None and images_of is None and not axes:
        return None
    if out is not None:
        raise InvalidRequestError("out", "cli.out_of_several")
    lists: list[Sequence[Changes]] = []
    if prompts is not None:
        if "prompt" in flags:
            raise InvalidRequestError("prompt", "cli.prompt_and_list")
        lists.append([{"prompt": line} for line in _lines(prompts)])
        flags = {**flags, "prompt": lists[0][0]["prompt"]}
    if images_of is not None:
        if "image" in flags:
            raise InvalidRequestError("image", "cli.image_and_folder")
        lists.append([{"image": str(path)} for path in _images(images_of)])
    return grid_of(request_from_flags(flags), axes, lists)


def _lines(file: str) -> list[str]:
    path = read_path("prompts", file, "cli.list_unreadable")
    try:
        with path.open("rb") as opened:
            text = opened.read(_MAX_BYTES).decode("utf-8-sig")
    except (OSError, ValueError) as error:
        raise InvalidRequestError("prompts", "cli.list_unreadable") from error
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines:
        raise InvalidRequestError("prompts", "cli.list_empty")
    return lines


def _images(folder: str) -> list[Path]:
    path = read_path("images_of", folder, "cli.images_unreadable")
    try:
        images = sorted(file for file in path.iterdir() if file.suffix.lower() in _IMAGES and file.is_file())
    except OSError as error:
        raise InvalidRequestError("images_of", "cli.images_unreadable") from error
    if not images:
        raise InvalidRequestError("images_of", "cli.no_images")
    return images
