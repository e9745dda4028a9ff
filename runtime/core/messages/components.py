"""Titles of a model's components and of the programs of engines, in messages, on the page and on the command line."""

from collections.abc import Collection, Mapping

TITLES: Mapping[str, str] = {
    "text_encoder": "Text encoder",
    "text_encoder_2": "Second text encoder",
    "connectors": "Text connectors",
    "image_encoder": "Image encoder",
    "vae_encoder": "VAE encoder",
    "transformer": "Transformer",
    "transformer_2": "Low-noise transformer",
    "latent_upsampler": "Latent upsampler",
    "vae": "VAE decoder",
    "audio_vae": "Sound decoder",
    "vocoder": "Vocoder",
    "frame_decoder": "Frame decoder",
    "interpolator": "Interpolator",
    "upscaler": "Upscaler",
    "preprocessor": "Model of control frames",
}
# Of the programs of engines that are not a whole component.
_PROGRAMS: Mapping[str, str] = {
    "vae_encoder_first": "VAE encoder, first frame",
    "vae_encoder_next": "VAE encoder, further frames",
    "vae_encoder_image": "VAE encoder, one image",
    "vae_first": "VAE decoder, first step",
    "vae_next": "VAE decoder, further steps",
    "vae_clip": "VAE decoder, whole clips",
    **{f"vae_group_{size}": f"VAE decoder, {size} latent frame{'s'[: size - 1]}" for size in range(1, 6)},
    "block_qkv": "Transformer blocks: query, key, value",
    "block_query": "Transformer blocks: text query",
    "block_single": "Transformer blocks: single blocks",
    "block_feed_forward": "Transformer blocks: feed-forward",
}
# "transformer" of a model with two.
_HIGH_NOISE = "High-noise transformer"


def title_of(name: str, components: Collection[str] = ()) -> str:
    """Return the title of a component, or of a program of engines.

    Args:
        components: all of its model, if known: one of two transformers is named by the noise that it removes.
    """
    if name == "transformer" and "transformer_2" in components:
        return _HIGH_NOISE
    return TITLES.get(name) or _PROGRAMS.get(name, name.replace("_", " ").capitalize())
