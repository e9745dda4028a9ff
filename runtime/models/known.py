"""Models that Tandem knows without having their weights: what they are, what they are called, where to get them.

Configurations are the published ones, https://huggingface.co/Wan-AI (Apache 2.0). The numbers of weights follow from
them; a test counts them with the libraries' own classes. Reads no file.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from runtime.models.spec import ModelSpec, TransformerSpec, VaeSpec
from runtime.models.timesteps import NoiseLevels
from runtime.models.wan import MAX_SEQUENCE_LENGTH, card_defaults, transformer_spec, vae_spec

_LICENSE = "Apache-2.0"
_SCHEDULER = "UniPCMultistepScheduler"
# Its shift is what the folder will say.
_NOISE = NoiseLevels(setting="flow_shift", fixed="", shift=math.nan, spread="unipc")
_BYTES_PER_WEIGHT = 4
# UMT5-XXL's encoder; its embedding, which two names share, counted once.
_UMT5_XXL = 5_680_910_336

_TRANSFORMER: Mapping[str, Any] = {
    "attention_head_dim": 128,
    "cross_attn_norm": True,
    "freq_dim": 256,
    "image_dim": None,
    "in_channels": 16,
    "out_channels": 16,
    "patch_size": [1, 2, 2],
    "qk_norm": "rms_norm_across_heads",
    "text_dim": 4096,
}
_WIDE: Mapping[str, Any] = {**_TRANSFORMER, "num_attention_heads": 40, "num_layers": 40, "ffn_dim": 13824}
_VAE: Mapping[str, Any] = {
    "base_dim": 96,
    "decoder_base_dim": None,
    "dim_mult": [1, 2, 4, 4],
    "in_channels": 3,
    "is_residual": False,
    "num_res_blocks": 2,
    "out_channels": 3,
    "patch_size": None,
    "scale_factor_spatial": 8,
    "scale_factor_temporal": 4,
    "temperal_downsample": [False, True, True],
    "z_dim": 16,
}
_VAE_5B: Mapping[str, Any] = {
    **_VAE,
    "base_dim": 160,
    "decoder_base_dim": 256,
    "in_channels": 12,
    "is_residual": True,
    "out_channels": 12,
    "patch_size": 2,
    "scale_factor_spatial": 16,
    "z_dim": 48,
}
# 1.3B was trained at 480p; its card calls 720p less stable.
_SIZES_480P = ((832, 480), (480, 832))


@dataclass(frozen=True, kw_only=True)
class KnownModel:
    """A published model.

    Attributes:
        name: as `--model` and `models list` have it.
        title: as people read it.
        repository: on huggingface.co, in diffusers' format.
        aliases: other names for it, in lower case.
        transformer, vae: their `config.json`.
        transformer_parameters, vae_parameters: numbers of weights, of one expert.
        experts, boundary_ratio, expand_timesteps: as in `ModelSpec`.
        sizes: where they are not those of its family's card.
        flow_shift: in Wan's own code (`sample_shift`); what runs is what is asked for, or the folder's.
    """

    name: str
    title: str
    repository: str
    aliases: frozenset[str]
    transformer: Mapping[str, Any]
    transformer_parameters: int
    vae: Mapping[str, Any] = field(default_factory=lambda: _VAE)
    vae_parameters: int = 126_892_531
    experts: int = 1
    boundary_ratio: float | None = None
    expand_timesteps: bool = False
    sizes: tuple[tuple[int, int], ...] = ()
    flow_shift: float = 5.0

    @property
    def names(self) -> frozenset[str]:
        """All that it may be called, in lower case."""
        repository = self.repository.lower()
        folder = repository.rpartition("/")[2]
        return self.aliases | {self.name, repository, folder, folder.removesuffix("-diffusers")}

    @property
    def license(self) -> str:
        """Return the licence of its weights."""
        return _LICENSE

    @property
    def folder(self) -> str:
        """Return what its folder is called."""
        return self.repository.rpartition("/")[2]

    def spec(self, weights_dir: Path) -> ModelSpec:
        """Return what it is, as if its folder were in `weights_dir`."""
        vae = vae_spec(dict(self.vae))
        experts = ("transformer", "transformer_2")[: self.experts]
        card = card_defaults(vae, self.experts)
        return ModelSpec(
            name=self.name,
            title=self.title,
            license=_LICENSE,
            directory=weights_dir / self.folder,
            transformer=transformer_spec(dict(self.transformer)),
            experts=self.experts,
            vae=vae,
            boundary_ratio=self.boundary_ratio,
            scheduler=_SCHEDULER,
            expand_timesteps=self.expand_timesteps,
            max_sequence_length=MAX_SEQUENCE_LENGTH,
            parameters={
                "text_encoder": _UMT5_XXL,
                **dict.fromkeys(experts, self.transformer_parameters),
                "vae": self.vae_parameters,
            },
            latent_rgb=None,
            **(card | {"sizes": self.sizes or card["sizes"]}),
            here=False,
            noise=_NOISE,
        )

    def describes(self, transformer: TransformerSpec, vae: VaeSpec, experts: int) -> bool:
        """Whether a folder of that architecture may be this model."""
        own = transformer_spec(dict(self.transformer)), vae_spec(dict(self.vae)), self.experts
        return own == (transformer, vae, experts)


KNOWN = (
    KnownModel(
        name="wan2.2-t2v-a14b",
        title="Wan2.2 T2V-A14B",
        repository="Wan-AI/Wan2.2-T2V-A14B-Diffusers",
        aliases=frozenset({"wan2.2-a14b", "wan2.2-t2v-14b", "wan2.2-14b", "a14b"}),
        transformer=_WIDE,
        transformer_parameters=14_288_491_584,
        experts=2,
        boundary_ratio=0.875,
        flow_shift=12.0,
    ),
    KnownModel(
        name="wan2.2-ti2v-5b",
        title="Wan2.2 TI2V-5B",
        repository="Wan-AI/Wan2.2-TI2V-5B-Diffusers",
        aliases=frozenset({"wan2.2-5b", "ti2v-5b"}),
        transformer={
            **_TRANSFORMER,
            "num_attention_heads": 24,
            "num_layers": 30,
            "ffn_dim": 14336,
            "in_channels": 48,
            "out_channels": 48,
        },
        transformer_parameters=4_999_787_712,
        vae=_VAE_5B,
        vae_parameters=704_688_668,
        expand_timesteps=True,
    ),
    KnownModel(
        name="wan2.1-t2v-1.3b",
        title="Wan2.1 T2V-1.3B",
        repository="Wan-AI/Wan2.1-T2V-1.3B-Diffusers",
        aliases=frozenset({"wan2.1-1.3b", "t2v-1.3b"}),
        transformer={**_TRANSFORMER, "num_attention_heads": 12, "num_layers": 30, "ffn_dim": 8960},
        transformer_parameters=1_418_996_800,
        sizes=_SIZES_480P,
    ),
    KnownModel(
        name="wan2.1-t2v-14b",
        title="Wan2.1 T2V-14B",
        repository="Wan-AI/Wan2.1-T2V-14B-Diffusers",
        aliases=frozenset({"wan2.1-14b", "t2v-14b"}),
        transformer=_WIDE,
        transformer_parameters=14_288_491_584,
    ),
)


def known_as(name: str) -> KnownModel | None:
    """Return the model that goes by a name, upper and lower case being alike."""
    return next((model for model in KNOWN if name.strip().lower() in model.names), None)


def published(spec: ModelSpec) -> KnownModel | None:
    """Return the published model that one is, by its name and its architecture."""
    known = known_as(spec.name) or known_as(spec.directory.name)
    is_it = known is not None and known.describes(spec.transformer, spec.vae, spec.experts)
    return known if is_it else None


def download_bytes(spec: ModelSpec) -> int:
    """Return about what fetching a known model takes, at most: published weights have 4 bytes each, or fewer."""
    return _BYTES_PER_WEIGHT * spec.total_parameters


def named(spec: ModelSpec) -> ModelSpec:
    """Return the spec of a folder with the title, licence and sizes of the known model that it is, if it is one.

    A folder is told by its name and its architecture; what its own `tandem.json` says stays.
    """
    known = known_as(spec.directory.name)
    if known is None or spec.license != "unknown" or not known.describes(spec.transformer, spec.vae, spec.experts):
        return spec
    return replace(spec, title=known.title, license=_LICENSE, sizes=known.sizes or spec.sizes)
