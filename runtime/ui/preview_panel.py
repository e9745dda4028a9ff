"""The panel of the plan preview in Make: what Generate would do with the form as it is now."""

from runtime.core.errors import TandemError
from runtime.core.request import COMPONENTS
from runtime.models.spec import ModelSpec
from runtime.server.model_choices import check_offered
from runtime.ui import form
from runtime.ui.panels import Call, Reply, drawn, unknown_action
from runtime.ui.plan_preview import PlanPreview
from runtime.ui.plan_summary import PlanSummary, badge_html, panel_html, stopped, summarize


class PreviewPanel:
    """The panel; see `panels.Panel`. Its parts are the components' badges and the summary."""

    def __init__(self, preview: PlanPreview, models: dict[str, ModelSpec]) -> None:
        self._preview = preview
        self._models = models

    def act(self, call: Call) -> Reply:
        """Summarise the plan; the reply has one line, and whether the model's engines are known."""
        if call.action != "look":
            raise unknown_action()
        summary = self._summary(call)
        return {"line": summary.line, "complete": summary.complete, "summary": summary}

    def draw(self, _call: Call, reply: Reply) -> dict[str, str]:
        """Return the badges and the summary."""
        summary: PlanSummary | None = reply.pop("summary", None)
        if summary is None:  # an error that `act` has reported
            return {}
        badges = {name: lambda name=name: badge_html(name, summary.badges.get(name)) for name in COMPONENTS}
        return drawn({**badges, "summary": lambda: panel_html(summary)})

    def _summary(self, call: Call) -> PlanSummary:
        try:
            request = form.read_settings(call.form, self._models)
            spec = check_offered(request.model, self._models)
        except TandemError as error:  # an invalid form has a summary too
            return stopped(error, COMPONENTS)
        return summarize(self._preview.preview(request, spec), spec.component_names)
