"""The flags that every command takes: `--json` and `--offline`."""

import functools
import inspect
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer

JsonFlag = Annotated[bool, typer.Option("--json", help="End standard output with one JSON object on its last line.")]
OfflineFlag = Annotated[bool, typer.Option("--offline", help="Fetch nothing from the internet.")]

# The second is huggingface_hub's, so that no library fetches anything behind Tandem's back.
_VARIABLES = ("TANDEM_OFFLINE", "HF_HUB_OFFLINE")


def take_offline(group: typer.Typer) -> None:
    """Give every command of a group the flag `--offline`."""
    for command in group.registered_commands:
        assert command.callback is not None
        command.callback = _taking_offline(command.callback)


@contextmanager
def fetching_nothing() -> Iterator[None]:
    """Let nothing be fetched while entered, by this process and those that it starts."""
    before = {name: os.environ.get(name) for name in _VARIABLES}
    os.environ.update(dict.fromkeys(_VARIABLES, "1"))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _taking_offline(command: Callable[..., Any]) -> Callable[..., Any]:
    own = inspect.signature(command, eval_str=True).parameters.values()

    @functools.wraps(command)
    def wrapper(**values: Any) -> Any:
        if not values.pop("offline"):
            return command(**values)
        with fetching_nothing():
            return command(**values)

    flag = inspect.Parameter("offline", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=OfflineFlag)
    parameters = [*(p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own), flag]
    wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # typer reads it
    wrapper.__annotations__ = {p.name: p.annotation for p in parameters}
    return wrapper
