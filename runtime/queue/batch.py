"""Batches: every prompt with every seed."""

from collections.abc import Sequence

from runtime.core.errors import InvalidRequestError
from runtime.core.request import Auto, GenerationRequest

MOST = 1000


def combined(
    request: GenerationRequest, prompts: Sequence[str], seeds: Sequence[int | Auto]
) -> list[GenerationRequest]:
    """Return the request once for each prompt and seed, seed by seed within a prompt.

    Args:
        prompts: empty ones are skipped; the request's own if there is none.
        seeds: the request's own if there is none.

    Raises:
        InvalidRequestError: for an invalid prompt or seed, or more than a thousand videos.
    """
    given = [prompt for prompt in prompts if prompt.strip()] or [request.prompt]
    chosen = list(seeds) or [request.seed]
    if len(given) * len(chosen) > MOST:
        raise InvalidRequestError("prompt", "queue.batch_too_large", videos=len(given) * len(chosen), maximum=MOST)
    return [request.replace(prompt=prompt, seed=seed) for prompt in given for seed in chosen]
