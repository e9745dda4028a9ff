"""Many videos asked for at once: every prompt with every seed."""

from collections.abc import Sequence
from dataclasses import replace

from runtime.core.errors import InvalidRequestError
from runtime.core.request import Auto, GenerationRequest

MOST = 1000


def combined(
    request: GenerationRequest, prompts: Sequence[str], seeds: Sequence[int | Auto]
) -> list[GenerationRequest]:
    """Return the request once for each prompt and seed, seed by seed within a prompt.

    Args:
        prompts: empty ones are passed over; without any it is the request's own.
        seeds: without any it is the request's own.

    Raises:
        InvalidRequestError: for a prompt or seed that cannot be, or more than a thousand videos.
    """
    given = [prompt for prompt in prompts if prompt.strip()] or [request.prompt]
    chosen = list(seeds) or [request.seed]
    if len(given) * len(chosen) > MOST:
        raise InvalidRequestError(
            "prompt", f"These are {len(given) * len(chosen):,} videos.", f"Ask for at most {MOST:,} at once."
        )
    return [replace(request, prompt=prompt, seed=seed) for prompt in given for seed in chosen]
