"""Repositories of a published variant, with the files of a tiny model under the published names."""

from pathlib import Path

from safetensors.torch import save_file

from runtime.models.catalogue import KnownVariant, known_variant
from tests import lora_files
from tests.models.hub import LoopbackHub, Repository, of_folder
from tests.transformer_files import save_fp8_scaled, wide_transformer

# Its files have no published hashes, which tiny ones could not match.
NAME, BASE = "wan2.2-t2v-a14b-fp8", "wan2.2-t2v-a14b"
HIGH, LOW = (
    f"split_files/diffusion_models/wan2.2_t2v_{kind}_noise_14B_fp8_scaled.safetensors" for kind in ("high", "low")
)


def publish(hub: LoopbackHub, base: Path, folder: Path) -> KnownVariant:
    """Publish the variant `NAME` on a hub.

    Args:
        base: a tiny model with two experts, whose other components fit `wide_transformer`.
        folder: for temporary files.
    """
    known = known_variant(NAME)
    assert known is not None
    hub.repositories[known.model.repository] = of_folder(base)
    transformer = wide_transformer()
    for number, (component, file) in enumerate(known.variant.transformers.items()):
        save_fp8_scaled(folder / component, dict(wide_transformer(seed=number).state_dict()))
        _add(hub, file.repository, file.path, folder / component)
    for number, lora in enumerate(known.variant.loras):
        factors = lora_files.factors(_Sizes(transformer.config), seed=number)  # type: ignore[arg-type]
        save_file(lora_files.wan(factors), folder / "lora")
        _add(hub, lora.file.repository, lora.file.path, folder / "lora")
    return known


def _add(hub: LoopbackHub, repository: str, path: str, file: Path) -> None:
    hub.repositories.setdefault(repository, Repository({})).files[path] = file.read_bytes()


class _Sizes:
    """The sizes of a transformer that LoRAs depend on."""

    def __init__(self, config: object) -> None:
        sizes = dict(config)  # type: ignore[call-overload]
        self.width = sizes["num_attention_heads"] * sizes["attention_head_dim"]
        self.ffn_dim, self.num_layers = sizes["ffn_dim"], sizes["num_layers"]
