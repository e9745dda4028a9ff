"""Engines of HunyuanVideo's text encoders equal PyTorch on every backend of a CPU."""

import pytest

from runtime.engines.verify import verify
from tests.engines.conftest import INDUCTOR, PROFILES, Build

# Inductor compiles C++: one is enough.
COMPILED = pytest.param("inductor", "text_encoder", marks=INDUCTOR.marks)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("builder", "name"),
    [*((builder, name) for builder in ("cpu", "openvino") for name in ("text_encoder", "text_encoder_2")), COMPILED],
)
def test_engines_equal_pytorch(built: Build, builder: str, name: str) -> None:
    engine = built(builder, "hunyuan-video", name, name, "float32", PROFILES[name])
    with engine.session() as session:
        result = verify(session, engine.program(), PROFILES[name], "float32")
    assert result.error < 1e-5, result.detail
