"""Titles of a model's components, in messages, on the page and on the command line."""

from collections.abc import Collection, Mapping

TITLES: Mapping[str, str] = {
    "text_encoder": "Text encoder",
    "transformer": "Transformer",
    "transformer_2": "Low-noise transformer",
    "vae": "VAE decoder",
}
# "transformer" of a model with two.
_HIGH_NOISE = "High-noise transformer"


def title_of(name: str, components: Collection[str] = ()) -> str:
    """Return a component's title.

    Args:
        components: all of its model, if known: one of two transformers is named by the noise that it removes.
    """
    if name == "transformer" and "transformer_2" in components:
        return _HIGH_NOISE
    return TITLES.get(name, name.replace("_", " ").capitalize())
