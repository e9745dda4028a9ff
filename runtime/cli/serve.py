"""`serve`, `serve keys` and `mcp`: the HTTP API without the web app, its keys, and the MCP server as a program."""

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from runtime.cli import terminal
from runtime.core import settings
from runtime.core.errors import SettingsError
from runtime.core.facts import shortened
from runtime.core.request import MAX_SIDE
from runtime.core.request_fields import read_size
from runtime.server.api_keys import ApiKeys, KeyLimits


def run(flags: Mapping[str, str | None], *, cluster: bool = False, mcp: bool = False) -> dict[str, Any]:
    """Serve the API until Ctrl-C; return its address.

    Args:
        cluster: whether other machines may join.
        mcp: whether it has an MCP server, too.
    """
    from runtime.server.serve import launch

    loaded = settings.load(flags, with_keys=True)
    return {"url": launch(loaded, cluster=cluster, mcp=mcp)}


def run_mcp(flags: Mapping[str, str | None]) -> dict[str, Any]:
    """Serve an MCP client over standard input and output until it closes its end; return the address of the API."""
    from runtime.server.serve import check_mcp

    check_mcp()
    from runtime.server.mcp.program import run as run_program

    return {"url": run_program(settings.load(flags, with_keys=True))}


def add_key(name: str, counts: Mapping[str, int], size: str | None) -> dict[str, Any]:
    """Add a key, print it, and return it.

    Args:
        counts: fields of `KeyLimits`.
        size: the largest size, such as "832x480".
    """
    limits = KeyLimits(**counts, pixels=None if size is None else _pixels(size))
    secret = _keys().add(name, limits)
    terminal.line("This key is shown once. Send it as `Authorization: Bearer KEY`:")
    terminal.result(secret)
    return {"name": name, "key": secret, "limits": limits.model_dump()}


def list_keys() -> dict[str, Any]:
    """Print and return the keys, without their secrets."""
    keys = _keys().keys() or ()
    if keys:
        rows = [(key.name, _when(key.created), _described(key.limits)) for key in keys]
        terminal.table(("Key", "Created", "Limits"), rows)
    else:
        terminal.line("No keys.")
    return {"keys": [{"name": key.name, "created": key.created, "limits": key.limits.model_dump()} for key in keys]}


def revoke_key(name: str) -> dict[str, Any]:
    """Revoke a key."""
    _keys().revoke(name)
    terminal.line(f"The key {name} is revoked. Its videos stay, and its queued ones are made.")
    return {"revoked": name}


def _keys() -> ApiKeys:
    return ApiKeys(settings.load(with_keys=True).cache_dir)


def _pixels(size: str) -> int:
    """Return width times height of a size such as "832x480"."""
    width, height = read_size(size) or (0, 0)
    pixels = width * height
    if not 1 <= pixels <= MAX_SIDE**2:
        raise SettingsError("settings.not_a_size", source="--size", value=shortened(size))
    return pixels


def _described(limits: KeyLimits) -> str:
    texts = [f"{limits.videos} at a time", f"{limits.per_hour} an hour"]
    texts += [f"{value} {name}" for name in ("frames", "steps", "pixels") if (value := getattr(limits, name))]
    return ", ".join(texts)


def _when(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds).astimezone():%Y-%m-%d %H:%M}"
