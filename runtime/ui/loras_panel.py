"""The list of LoRA files in Make: which are in the folder, and which fit the selected model. It changes nothing.

The page's script writes what is selected into the form's text field, which a request is read from.
"""

from dataclasses import replace
from pathlib import Path

from runtime.core.loras import BOTH
from runtime.models.loras import ListedLora, checked, listed, loras_dir
from runtime.models.spec import ModelSpec
from runtime.ui import form
from runtime.ui.formatting import page_text, render
from runtime.ui.panels import Call, Reply, drawn, unknown_action

# More are found by name with the text field.
MOST_LISTED = 200
# From this many on, the list has a search field.
_SEARCHED = 8
# Results of checks that are kept.
_KEPT = 2000


class LorasPanel:
    """The list of LoRA files; see `panels.Panel`.

    Args:
        models: the models that the page offers, by name.
    """

    def __init__(self, models: dict[str, ModelSpec], weights_dir: Path) -> None:
        self._models = models
        self._weights_dir = weights_dir
        self._checked: dict[tuple[ListedLora, str], ListedLora] = {}

    def act(self, call: Call) -> Reply:
        """Accept only the request for changes."""
        if call.action != "refresh":
            raise unknown_action()
        return {}

    def draw(self, call: Call, _reply: Reply) -> dict[str, str]:
        """Return the HTML of the list."""
        return drawn({"list": lambda: self._list(call)})

    def _list(self, call: Call) -> str:
        spec = form.read_model(call.form, self._models)
        files = listed(self._weights_dir)
        rows = [self._check(file, spec) for file in files[:MOST_LISTED]]
        return render(
            "loras_list.html",
            rows=[(row, "" if row.problem is None else page_text(row.problem.fact).what) for row in rows],
            search=len(rows) >= _SEARCHED,
            more=len(files) - len(rows),
            folder=loras_dir(self._weights_dir),
            both=BOTH,
        )

    def _check(self, lora: ListedLora, spec: ModelSpec) -> ListedLora:
        """Return a file's properties for a model; the header is read again when the file changes."""
        key = (replace(lora, problem=None), spec.name)
        if key not in self._checked:
            if len(self._checked) >= _KEPT:
                self._checked.clear()
            self._checked[key] = checked(lora, spec)
        return self._checked[key]
