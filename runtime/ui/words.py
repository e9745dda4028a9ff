"""How the page renders facts and errors: settings by the labels of the form, components by their titles."""

from runtime.core.facts import Fact, Text, Words, render
from runtime.core.request import BACKENDS, FIELDS
from runtime.core.request_fields import Backends, Choice, StepCache

COMPONENT_TITLES = {
    "text_encoder": "Text encoder",
    "transformer": "Transformer",
    "transformer_2": "Low-noise transformer",
    "vae": "VAE decoder",
}


class FormWords(Words):
    """What the form calls settings and components."""

    def setting(self, name: str, value: str | None = None) -> str:
        """Return a control's label, with a value its choice: “Offload”, “Offload: By block”.

        A component's backend is named without a label: “PyTorch” for the VAE decoder.
        """
        component, separator, backend = (value or "").partition("=")
        if name in {"backend", "backends"} and separator:
            return f"“{BACKENDS.get(backend, backend)}” for the {lowered(self.component(component))}"
        declared = FIELDS.get(name)
        label = name.replace("_", " ").capitalize() if declared is None else declared.label
        if value is None:
            return f"“{label}”"
        choices = declared.choices if isinstance(declared, Choice | Backends | StepCache) else {}
        return f"“{label}: {choices.get(value, value)}”"

    def component(self, name: str) -> str:
        """Return a component's title on the form."""
        return COMPONENT_TITLES.get(name, super().component(name))


WORDS = FormWords()


def text(fact: Fact) -> str:
    """Return a fact with its remedy as one paragraph."""
    return " ".join(filter(None, page_text(fact)))


def page_text(fact: Fact) -> Text:
    """Return what a fact says and what to do about it."""
    return render(fact, WORDS)


def lowered(title: str) -> str:
    """Return a title for the middle of a sentence; abbreviations stay as they are."""
    return title if title[1:2].isupper() else f"{title[:1].lower()}{title[1:]}"
