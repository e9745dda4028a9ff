"""`enhance`, and `generate --enhance`: prompts by the chat model of the setting `enhancer`."""

from collections.abc import Sequence
from typing import Any

from runtime.cli import terminal
from runtime.cli.exit_codes import cancel_on_signals
from runtime.core import settings
from runtime.core.request import GenerationRequest
from runtime.core.settings import Settings
from runtime.core.templates import as_written
from runtime.machine.probe import Machine, probe
from runtime.models.catalogue import check_makes_videos, look_up
from runtime.models.enhancers import enhancer_of
from runtime.models.wildcards import with_prompt
from runtime.queue.enhancing import EnhancerRequest, enhanced_here, with_enhanced


def enhance(prompt: str, model: str | None, *, from_image: bool) -> dict[str, Any]:
    """Print and return an enhanced prompt.

    Args:
        model: name or folder of the model that it is for; `None` for the one of requests that name none.
        from_image: whether the video begins with an image.

    Raises:
        TandemError: if the prompt cannot be enhanced.
    """
    loaded = settings.load()
    enhancer = enhancer_of(loaded)
    spec = look_up(model or loaded.model, loaded.weights_dir)
    check_makes_videos(spec, spec.name)
    request = EnhancerRequest.of(prompt, spec, from_image=from_image)
    terminal.line(f"Enhancing with {enhancer.title}.")
    with cancel_on_signals() as cancel:
        (made,) = map(as_written, enhanced_here([request], enhancer, probe(), cancel))
    terminal.result(made)
    return {"prompt": made, "original_prompt": request.prompt, "enhancer": enhancer.title}


def enhanced(requests: Sequence[GenerationRequest], loaded: Settings, machine: Machine) -> list[GenerationRequest]:
    """Return requests with enhanced prompts, which are printed; each prompt is enhanced once.

    Raises:
        TandemError: if one cannot be enhanced.
    """
    enhancer = enhancer_of(loaded)
    requests = [with_prompt(request, loaded.cache_dir) for request in requests]
    questions = [EnhancerRequest.of_video(request, look_up(request.model, loaded.weights_dir)) for request in requests]
    terminal.line(f"Enhancing with {enhancer.title}.")
    distinct = list(dict.fromkeys(questions))
    prompts: dict[EnhancerRequest, str] = {}
    with cancel_on_signals() as cancel:
        for question, prompt in zip(distinct, enhanced_here(distinct, enhancer, machine, cancel), strict=True):
            prompts[question] = prompt
            terminal.line(f"Prompt: {prompt}")
    return [with_enhanced(request, prompts[question]) for request, question in zip(requests, questions, strict=True)]
