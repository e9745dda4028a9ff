"""Embeddings of images equal those of diffusers' `HunyuanVideoFramepackPipeline`."""

import numpy as np
import pytest
import torch
from PIL import Image

from runtime.families.framepack.components import image_encoder, image_model
from runtime.families.framepack.image_encoder import pixels_of
from runtime.families.framepack.programs import ImageEncoderForm
from tests.families.framepack_models import pipeline


@pytest.mark.parametrize(("width", "height"), [(48, 32), (16, 64), (32, 32)])
def test_equals_pipeline(width: int, height: int) -> None:
    reference = pipeline()
    values = np.random.default_rng(3).integers(0, 256, (2, height, width, 3), dtype=np.uint8)
    images = [Image.fromarray(one) for one in values]
    encoder = image_encoder(reference.feature_extractor, image_model(reference.image_encoder, "cpu"))
    expected = []
    for image in images:
        pixels = reference.video_processor.preprocess(image, height, width)
        assert torch.equal(pixels_of(image), pixels)
        with torch.no_grad():
            expected.append(reference.encode_image(pixels))
    torch.testing.assert_close(encoder.encode(images), torch.cat(expected, dim=1), atol=1e-5, rtol=0)


def test_the_exportable_form_equals_transformers() -> None:
    module = pipeline().image_encoder.eval()
    pixels = torch.randn(1, 3, 30, 30, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        expected = module(pixels).last_hidden_state
        torch.testing.assert_close(ImageEncoderForm(module)(pixels), expected, rtol=1e-5, atol=1e-5)
