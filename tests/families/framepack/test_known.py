"""The published models: parameter counts agree with the libraries' classes, and plans need no download."""

from pathlib import Path

import pytest
import torch
from diffusers import HunyuanVideoFramepackTransformer3DModel
from transformers import SiglipVisionConfig, SiglipVisionModel

from runtime.core.errors import InvalidRequestError
from runtime.models.catalogue import look_up
from runtime.models.hub.download import source_of
from runtime.models.registry import KnownModel, published_models
from tests.families.wan.test_known import weights

KNOWN = published_models("framepack")
HUNYUAN_VIDEO = published_models("hunyuan_video")
ORDERS = {"framepack-i2v": "inverted_anti_drifting", "framepack-f1-i2v": "vanilla"}


@pytest.mark.parametrize("known", KNOWN, ids=lambda known: known.name)
def test_parameter_counts_are_those_of_the_architectures(known: KnownModel) -> None:
    with torch.device("meta"):
        modules = {
            "image_encoder": SiglipVisionModel(SiglipVisionConfig(**known.configs["image_encoder"])),
            "transformer": HunyuanVideoFramepackTransformer3DModel(**known.configs["transformer"]),
        }
    counted = {name: weights(module) for name, module in modules.items()}
    # tests/families/hunyuan_video/test_known.py counts these.
    shared = dict(HUNYUAN_VIDEO[0].parameters)
    assert {**shared, "vae_encoder": shared["vae"], **counted} == known.parameters
    spec = known.spec(Path("none"))
    assert spec.total_parameters == sum(known.parameters.values()) - shared["vae"]


@pytest.mark.parametrize(("name", "order"), ORDERS.items())
def test_it_is_planned_with_before_its_weights_are_here(name: str, order: str) -> None:
    spec = look_up(name, Path("none"))
    assert (spec.name, spec.is_downloaded) == (name, False)
    assert spec.section is not None and spec.image_input is not None
    assert spec.section.sampling_type == order
    assert (spec.image_input.last == "optional") == (order == "inverted_anti_drifting")
    assert (spec.image_input.tokens, spec.image_input.width) == (729, 1152)


def test_a_revision_of_several_repositories_is_refused() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        source_of("framepack-i2v", "v1")
    assert caught.value.fact.code == "hub.revision_of_parts"
