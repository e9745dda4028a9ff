"""Batches: one request with several values of some fields, each combination a video."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import product
from typing import Any, Final

from runtime.core.errors import InvalidRequestError
from runtime.core.facts import shortened
from runtime.core.request import AUTO, FIELDS, PROMPT_SOURCES, GenerationRequest, random_seed

MOST_VIDEOS = 1000
MOST_AXES = 3
_RANGE = re.compile(r"\s*([0-9]{1,16})\s*\.\.\s*([0-9]{1,16})\s*")
_NO_AXES = frozenset({*PROMPT_SOURCES, "keyframes", "keyframe_seconds"})
# The fields that a grid can vary, by the names of options and of fields.
AXES: Final[Mapping[str, str]] = {
    **{declared.flag.removeprefix("--"): name for name, declared in FIELDS.items() if declared.flag},
    **{name: name for name in FIELDS},
}

# Fields of a request that change together, and their values of one video.
Changes = Mapping[str, Any]


def read_axis(text: str) -> list[Changes]:
    """Return what a text such as "steps=10,20" or "seed=1..3" varies: a field's values, one for each column or row.

    Values with commas are separated by "|", as in "prompt=a boat, at sea|a kite".

    Raises:
        InvalidRequestError: for an unknown field, or no or too many values. Values are not validated.
    """
    name, equals, values = text.partition("=")
    if not equals:
        raise InvalidRequestError("grid", "request.grid_without_values", value=shortened(text))
    field = _field(name.strip())
    declared = FIELDS[field]
    span = _RANGE.fullmatch(values)
    if span is not None:
        first, last = int(span[1]), int(span[2])
        if not first <= last < first + MOST_VIDEOS:
            raise InvalidRequestError("grid", "request.grid_range", value=shortened(values), most=MOST_VIDEOS)
        return [{field: number} for number in range(first, last + 1)]
    texts = [part.strip() for part in values.split("|" if "|" in values else ",")]
    if not all(texts):
        raise InvalidRequestError("grid", "request.grid_without_values", value=shortened(text))
    return [{field: [part] if declared.repeatable else declared.parse(part)} for part in texts]


def axes_of(grid: object) -> list[list[Changes]]:
    """Return the axes of a grid in JSON: an object with a list of values for each field.

    Raises:
        InvalidRequestError: see `read_axis`.
    """
    if not isinstance(grid, Mapping):
        raise InvalidRequestError("grid", "request.grid_not_lists")
    axes = list[list[Changes]]()
    for name, values in grid.items():
        field = _field(name)
        if not isinstance(values, list | tuple) or not values or len(values) > MOST_VIDEOS:
            raise InvalidRequestError("grid", "request.grid_not_lists")
        axes.append([{field: value} for value in values])
    return axes


def grid_of(
    request: GenerationRequest,
    axes: Sequence[Sequence[Changes]],
    lists: Sequence[Sequence[Changes]] = (),
    make: Callable[[Changes], GenerationRequest] | None = None,
) -> list[GenerationRequest]:
    """Return the request with every combination of values of some axes; the last axis varies first.

    With axes, all videos have one seed, unless an axis has seeds.

    Args:
        lists: further changes, which come before the axes: prompts and images.
        make: returns the request with changes; by default, validates fields as `GenerationRequest` does.

    Raises:
        InvalidRequestError: for axes of the same field, too many axes, an invalid value, or too many videos.
    """
    if len(axes) > MOST_AXES:
        raise InvalidRequestError("grid", "request.grid_axes", axes=len(axes), most=MOST_AXES)
    fields = [field for axis in [*lists, *axes] for field in axis[0]]
    repeated = next((field for field in fields if fields.count(field) > 1), None)
    if repeated is not None:
        raise InvalidRequestError("grid", "request.grid_repeated", field=repeated)
    one_seed = axes and "seed" not in fields and request.seed == AUTO
    seeds = [[{"seed": random_seed()}]] if one_seed else []
    return combinations(request, [*seeds, *lists, *axes], "grid", make)


def combinations(
    request: GenerationRequest,
    axes: Iterable[Sequence[Changes]],
    field: str = "prompt",
    make: Callable[[Changes], GenerationRequest] | None = None,
) -> list[GenerationRequest]:
    """Return the request with every combination of changes, one of each axis; the last axis varies first.

    A changed prompt is a template again.

    Args:
        field: the one to name if there are too many videos.
        make: see `grid_of`.

    Raises:
        InvalidRequestError: for an invalid value, or more than `MOST_VIDEOS`.
    """
    axes = list(axes)
    count = 1
    for axis in axes:
        count *= len(axis)
    if count > MOST_VIDEOS:
        raise InvalidRequestError(field, "queue.batch_too_large", videos=count, maximum=MOST_VIDEOS)
    made = []
    for changes in product(*axes):
        merged = {name: value for change in changes for name, value in change.items()}
        merged |= dict.fromkeys(PROMPT_SOURCES) if "prompt" in merged else {}
        made.append(request.replace(**merged) if make is None else make(merged))
    return made


def varied(requests: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return the fields whose values differ between stored requests, each with its values in order.

    A template, or a text that was enhanced, stands for the prompts that were made of it.
    """
    fields = {}
    for name in FIELDS.keys() - {*PROMPT_SOURCES}:
        values = list[Any]()
        for value in (typed(request, name) for request in requests):
            if value not in values:
                values.append(value)
        if len(values) > 1:
            fields[name] = values
    return {name: fields[name] for name in FIELDS if name in fields}


def typed(request: Mapping[str, Any], name: str) -> Any:
    """Return the value of a stored request's field, of the prompt what it was made of."""
    sources = [request.get(source) for source in PROMPT_SOURCES] if name == "prompt" else []
    return next(filter(None, sources), request.get(name))


def _field(name: object) -> str:
    field = AXES.get(name.strip()) if isinstance(name, str) else None
    if field is None or field in _NO_AXES:
        # Of each field the option's name, which is the last one in reverse order.
        names = {AXES[option]: option for option in reversed(tuple(AXES))}
        known = [names[of] for of in FIELDS if of not in _NO_AXES]
        raise InvalidRequestError("grid", "request.grid_field", name=shortened(name), known=known)
    return field
