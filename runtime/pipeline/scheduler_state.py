"""Save and restore the state of a diffusers scheduler between steps: all its attributes but the configuration.

Values are numbers, text, tensors, and lists, tuples and dictionaries of them; a scheduler with any other value is
refused. Tensors are not copied: schedulers replace their tensors and do not modify them, which
tests/pipeline/test_scheduler_state.py verifies.
"""

from collections.abc import Mapping
from typing import Any

import torch

from runtime.core.errors import CheckpointError

# Set by loading.
_CONFIGURATION = frozenset({"_internal_dict"})
_PLAIN = (type(None), bool, int, float, str)


def snapshot(scheduler: Any) -> dict[str, Any]:
    """Return a scheduler's state, which later steps do not change.

    Raises:
        CheckpointError: if an attribute is something else than numbers, text and tensors.
    """
    state = {name: value for name, value in vars(scheduler).items() if name not in _CONFIGURATION}
    return {name: _copied(value, f"{type(scheduler).__name__}.{name}") for name, value in state.items()}


def restore(scheduler: Any, state: Mapping[str, Any]) -> None:
    """Restore the state of a scheduler whose timesteps are set.

    Raises:
        CheckpointError: if another version of the scheduler had this state.
    """
    # The state may have more: attributes that first appear in a step, such as UniPC's `this_order`.
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
