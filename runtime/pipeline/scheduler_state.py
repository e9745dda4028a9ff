"""What a diffusers scheduler remembers between steps, taken out and put back. Generic: whatever it keeps as attributes.

The values are numbers, text, tensors, and lists, tuples and dictionaries of them; a scheduler that keeps anything else
is refused. Tensors are taken as they are: schedulers put new ones in their place, they do not write into them
(tests/pipeline/test_scheduler_state.py holds those of the Wan family to that).
"""

from collections.abc import Mapping
from typing import Any

import torch

from runtime.core.errors import CheckpointError

# The configuration, which loading sets.
_CONFIGURATION = frozenset({"_internal_dict"})
_PLAIN = (type(None), bool, int, float, str)


def snapshot(scheduler: Any) -> dict[str, Any]:
    """Return all that a scheduler remembers; it goes on without changing what is returned.

    Raises:
        CheckpointError: if it keeps something else than numbers, text and tensors.
    """
    kept = {name: value for name, value in vars(scheduler).items() if name not in _CONFIGURATION}
    return {name: _copied(value, f"{type(scheduler).__name__}.{name}") for name, value in kept.items()}


def restore(scheduler: Any, state: Mapping[str, Any]) -> None:
    """Let a scheduler whose timesteps are set remember `state`.

    Raises:
        CheckpointError: if the state was taken from one of another version.
    """
    # One that first appears in a step, such as UniPC's `this_order`, is in the state alone.
    if snapshot(scheduler).keys() - state.keys():
        raise CheckpointError("checkpoint.other_scheduler", scheduler=type(scheduler).__name__)
    for name, value in state.items():
        setattr(scheduler, name, _copied(value, name))


def _copied(value: Any, name: str) -> Any:
    if isinstance(value, (*_PLAIN, torch.Tensor)):
        return value
    if isinstance(value, list | tuple):
        return type(value)(_copied(item, name) for item in value)
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: _copied(item, name) for key, item in value.items()}
    raise CheckpointError("checkpoint.scheduler_value", attribute=name, type=type(value).__name__)
