"""How the page renders facts and errors: settings by the labels of the form, components by their titles."""

from runtime.core.errors import InvalidRequestError, TandemError
from runtime.core.facts import Fact, Text, render
from runtime.core.request import BACKENDS
from runtime.ui import fields
from runtime.ui.acceleration import TITLES, in_form_words


class PageWords(fields.FormWords):
    """What the page calls settings and components."""

    def setting(self, name: str, value: str | None = None) -> str:
        """Return a setting as the form shows it: “Offload: By block”, or “PyTorch” for the VAE decoder."""
        if name in {"backend", "backends"} and value is not None and "=" in value:
            component, _, backend = value.partition("=")
            return f"“{BACKENDS.get(backend, backend)}” for the {lowered(self.component(component))}"
        return super().setting(name, value)

    def component(self, name: str) -> str:
        """Return a component's title on the form."""
        return TITLES.get(name, super().component(name))


WORDS = PageWords()


def text(fact: Fact | str) -> str:
    """Return a fact with its remedy, or a text that is not a fact yet, as the page says it."""
    return in_form_words(fact) if isinstance(fact, str) else " ".join(filter(None, page_text(fact)))


def page_text(fact: Fact) -> Text:
    """Return what a fact says and what to do about it."""
    what, remedy = render(fact, WORDS)
    return Text(in_form_words(what), in_form_words(remedy))


def explain(error: TandemError) -> str:
    """Return an error as one paragraph: what is wrong and what to do about it."""
    what, remedy = page_text(error.fact)
    # The name of a field begins the sentence; the name of a file stays as it is.
    if isinstance(error, InvalidRequestError):
        what = f"{what[:1].upper()}{what[1:]}"
    return f"{what} {remedy}".strip()


def lowered(title: str) -> str:
    """Return a title for the middle of a sentence; abbreviations stay as they are."""
    return title if title[1:2].isupper() else f"{title[:1].lower()}{title[1:]}"
