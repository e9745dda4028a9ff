"""Decoders of single frames: diffusers' `AutoencoderDC`, and OWL's, which world models use.

`make_batched_decode_fn` decodes latents of any number of frames, see `batched`. Importing this package imports no
torch; using a name from `batched` does.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from runtime.families.dcae.batched import BatchedDecoder, make_batched_decode_fn
    from runtime.families.dcae.components import load_decoder

__all__ = ["BatchedDecoder", "load_decoder", "make_batched_decode_fn"]


def __getattr__(name: str) -> Any:
    """Import a name on first use."""
    from importlib import import_module

    if name not in __all__:
        raise AttributeError(name)
    module = "components" if name == "load_decoder" else "batched"
    return getattr(import_module(f"{__name__}.{module}"), name)
