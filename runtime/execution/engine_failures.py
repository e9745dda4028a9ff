"""Why an engine failed."""

import logging

import torch

from runtime.core.cancel import CancelledError, PausedError
from runtime.core.errors import DeviceLostError, EngineError, first_line, ran_out
from runtime.core.facts import Fact
from runtime.upstream.torch import cuda_failure

_ERROR_LENGTH = 300

logger = logging.getLogger(__name__)


def failure_of_engine(error: Exception, device: str | torch.device, out_of_memory: str) -> Fact:
    """Return why an engine failed, so that PyTorch takes its place; call it in the handler of the error.

    Args:
        error: of any type: every library has its own.
        out_of_memory: the code to return if memory ran out.

    Raises:
        DeviceLostError: if nothing can run on the device in this process any more.
        CancelledError, PausedError: if that is the error.
    """
    if isinstance(error, CancelledError | PausedError):
        raise error
    if torch.device(device).type == "cuda" and cuda_failure(device) is not None:
        raise DeviceLostError(error=first_line(error)) from error
    if isinstance(error, EngineError):
        return error.fact
    if ran_out(error) is not None:
        return Fact(out_of_memory)
    logger.warning("An engine failed", exc_info=error)
    return Fact("execution.engine_failed", {"error": first_line(error)[:_ERROR_LENGTH]})
