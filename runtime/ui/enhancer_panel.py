"""The button "Enhance" of the prompt: it asks for a better prompt, follows how far that is, and can stop it."""

from collections.abc import Mapping
from typing import Any

from runtime.core.templates import as_written
from runtime.models.spec import ModelSpec
from runtime.queue.enhancing import Enhancements, EnhancerRequest
from runtime.ui import form
from runtime.ui.formatting import page_text, paragraph
from runtime.ui.panels import Call, Reply, unknown_action


class EnhancerPanel:
    """The button's requests; see `panels.Panel`. The script draws it.

    Args:
        models: what the page offers, by name.
    """

    def __init__(self, enhancements: Enhancements, models: Mapping[str, ModelSpec]) -> None:
        self._enhancements = enhancements
        self._models = models

    def act(self, call: Call) -> Reply:
        """Carry out an action."""
        match call.action:
            case "enhance":
                return {"id": self._enhancements.start(self._request(call)).id}
            case "progress" | "cancel":
                return self._followed(call)
        raise unknown_action()

    def draw(self, _call: Call, _reply: Reply) -> dict[str, str]:
        """Return nothing: the button is no part of a tab."""
        return {}

    def _request(self, call: Call) -> EnhancerRequest:
        values = form.by_name(call.form)
        spec = form.read_model(call.form, dict(self._models))
        from_image = bool(values["image"]) and spec.image_input is not None
        return EnhancerRequest.of(call.values.get("prompt"), spec, from_image=from_image)

    def _followed(self, call: Call) -> Reply:
        """Return how far an enhancement is; cancel it if that is the action."""
        enhancement = self._enhancements.find(call.target)
        if enhancement is None:
            raise unknown_action()
        if call.action == "cancel":
            enhancement.cancel()
            return {}
        progress = enhancement.progress()
        reply: dict[str, Any] = {"state": progress.state, "prompt": as_written(progress.prompt)}
        if progress.line is not None:
            reply["line"] = page_text(progress.line).what
        if progress.problem is not None and progress.state == "failed":
            reply |= {"message": paragraph(progress.problem), "error": True}
        return reply
