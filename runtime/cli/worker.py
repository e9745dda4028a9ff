"""`worker`: make videos for the head of a cluster."""

from typing import Any

from runtime.cli import terminal
from runtime.core import settings


def run(address: str, gpus: int) -> dict[str, Any]:
    """Join a head until Ctrl-C; return how often it was joined.

    Args:
        gpus: GPUs of one worker.
    """
    from runtime.server.cluster.node import join

    return {"joined": join(address, settings.load({}, with_keys=True), gpus, terminal.line)}
