"""Programs: the modules that are exported and built as engines, with their input and output tensors.

A component has one program, each part of a VAE up to two. The tensors are the same for every backend and precision.
The batch size is 1:

    text_encoder       input_ids, attention_mask (1, L) int64                -> embeds (1, L, D), zero in the padding
    text_encoder_2     the same
    image_encoder      pixels (1, 3, S, S)                                   -> embeds (1, T, E)
    vae_encoder_first  frames (1, H, W, 3)                                   -> z (1, C, 1, h, w), cache_0 … or none
    vae_encoder_next   frames (4, H, W, 3), cache_0 …                        -> z (1, C, 1, h, w), cache_0 …
    vae_encoder_image  frames (1, H, W, 3)                                   -> moments (1, 2C, 1, h, w), means first
    transformer        latents (1, C, F, h, w), timestep, text_embeds (1, L, D) -> velocity, like latents
    vae_first          z (1, C, 1, h, w)                                     -> frames (1, H, W, 3), cache_0 …
    vae_next           z (1, C, n, h, w), cache_0 …                          -> frames (4n, H, W, 3), cache_0 …
    vae_clip           z (1, C, n, h, w)                                     -> frames (4(n - 1) + 1, H, W, 3)
    vae_group_n        the same, of a group of n latent frames, 1 to 5       -> the same, some values beyond -1 and 1
    audio_vae          sound (1, C, n, bins)                                 -> spectrum (1, channels, frames, bins)
    vocoder            spectrum (1, channels, frames, bins)                  -> samples (1, channels, samples)
    frame_decoder      latent_frames (n, C, h, w)                            -> decoded_frames (n, channels, H, W)
    upscaler           latent_frames (n, 3, h, w)                            -> decoded_frames (n, 3, H, W)
    interpolator       latent_frames (n, 6, h, w)                            -> decoded_frames (n, 3, h, w)

The batch size of `frame_decoder` is n, which a profile counts as frames; its frames may be beyond -1 and 1. That of
`upscaler` and `interpolator` is the same; the colors of their frames are in 0 to 1. The interpolator takes two frames
and returns the one between them.

The transformer's timestep has one value, or two for a model that starts from a first frame: one engine serves its
videos from text, with equal values, and from images. Latents of given frames are channels after the model's own, which
alone the velocity has; see `execution.components.Denoiser`.

A transformer may also have programs of block engines (`ModelSpec.block_programs`), whose tensors the family defines:
see `block_programs`.

A VAE decoder has either `vae_first` and `vae_next`, which decode a clip in steps, or `vae_group_1` to `vae_group_5`,
which decode groups that overlap (`models.vae_groups`), or `vae_clip`; `ModelSpec.programs` states which. An
imported engine may be a `vae_clip` for any family.

A profile of `audio_vae` or `vocoder` has n, the latents of the sound, as frames, and 1 as height and width.

Tensors are float32, except the int64 inputs and the caches, which have the dtype that the program computes in. Frames
and samples are in -1 to 1.

Engine keys contain a hash of the code that defines programs (`key_parts.export_revision`): changing it makes every
engine stale.
"""

from collections.abc import Callable

import torch

from runtime.core.plan import ComponentPlan, is_block_program
from runtime.engines.block_programs import BlockProgram
from runtime.engines.component_programs import Program
from runtime.engines.fp8 import ACTIVATIONS, Fp8Part
from runtime.engines.key_parts import BLOCK_TOKENS
from runtime.models.quantization import FP8
from runtime.models.registry import components_of
from runtime.models.spec import ModelSpec
from runtime.models.weights import load_module

# Makes the exportable form of a program: a module that takes and returns the tensors above. Arguments: the model, the
# program's name, and a function that loads the component's weights. The form has these attributes:
#   text encoder   vocabulary: number of tokens
#   image encoder  side: pixels of an image's side
#   sound          input_shape(n): the shape of its input for n latents of the sound
#   VAE step       cache_count: number of caches
#   transformer    cuts_text: whether it also takes `text_padding`, see `component_programs.cut_text`; optional
# For a program of block engines it is a `BlockPart`; the weights are not loaded.
MakeForm = Callable[[ModelSpec, str, Callable[[], torch.nn.Module]], torch.nn.Module]


def load_program(
    spec: ModelSpec, component: str, name: str, *, device: str, dtype: str, tokens: int = BLOCK_TOKENS
) -> Program:
    """Load a component's weights and return one of its programs.

    Args:
        component: the component to load; "transformer" and "transformer_2" have the same program, "transformer".
        name: one of `key_parts.runnable_programs`, or of the model's block programs, which need no weights.
        device: a torch device.
        dtype: "float32", "bfloat16", "float16", or "fp8" for a block engine (`engines.fp8`).
        tokens: the most tokens in one call of a block engine.

    Raises:
        ModelError: if the weights do not fit the configuration.
    """
    part = ComponentPlan(backend="pytorch", device=device, dtype=dtype, weights_bytes=0, reasons=())
    make_form: MakeForm = components_of(spec.family).make_form
    form = make_form(spec, name, lambda: load_module(spec, component, part, dequantize=True)).eval()
    if is_block_program(name):
        if dtype == FP8:
            form, dtype = Fp8Part(form), ACTIVATIONS
        return BlockProgram(name, form.to(device), spec, dtype, torch.device(device), tokens)
    return Program(name, form, spec)
