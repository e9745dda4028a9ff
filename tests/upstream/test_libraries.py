"""What `runtime.upstream.libraries` changes in diffusers, transformers and TorchDynamo: each test names what broke."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(code: str, *more: Path) -> None:
    """Run code in a process of its own, with more folders of packages."""
    paths = {"PYTHONPATH": os.pathsep.join(map(str, (*more, ROOT)))}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=os.environ | paths, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_one_model_is_imported_without_the_others() -> None:
    run("""
import sys
from runtime.upstream import libraries
from diffusers.models.transformers.transformer_wan import WanTransformer3DModel
from diffusers.models.autoencoders.autoencoder_kl_wan import AutoencoderKLWan
from transformers import UMT5EncoderModel
loaded = set(sys.modules)
assert "diffusers.models.transformers.transformer_allegro" not in loaded, "transformers"
assert "diffusers.models.autoencoders.autoencoder_kl_allegro" not in loaded, "autoencoders"
assert "diffusers.models.unets.unet_1d" not in loaded, "unets"
from diffusers.models.transformers import AllegroTransformer3DModel, WanTransformer3DModel as same
from diffusers.models.autoencoders import AutoencoderKLAllegro
from diffusers.models.unets import UNet1DModel
import diffusers
assert same is WanTransformer3DModel is diffusers.WanTransformer3DModel
assert diffusers.AllegroTransformer3DModel is AllegroTransformer3DModel
try:
    from diffusers.models.transformers import NoSuchModel
except ImportError:
    pass
else:
    raise AssertionError("a name that is not there")
""")


@pytest.mark.slow
def test_names_of_other_models_are_read_when_one_is_looked_up() -> None:
    run("""
import sys
from runtime.upstream.libraries import transformers
from transformers import CLIPVisionModel, UMT5EncoderModel
few = set(transformers.__all__)
assert {"CLIPVisionModel", "LlamaModel", "SiglipVisionModel", "UMT5EncoderModel"} < few, "what Tandem uses"
assert "WhisperModel" not in few and len(few) < 1500, "the source of all models is read"
from transformers import WhisperConfig, WhisperModel
assert WhisperModel.config_class is WhisperConfig
from transformers.models import whisper
assert whisper.WhisperModel is WhisperModel
from transformers import CLIPVisionModel as same
assert same is CLIPVisionModel
try:
    transformers.NoSuchModel
except AttributeError:
    pass
else:
    raise AssertionError("a name that is not there")
""")


@pytest.mark.slow
def test_decorators_are_applied_when_dynamo_is_imported() -> None:
    run("""
import sys
import torch
from runtime.upstream import libraries
assert "torch._dynamo" not in sys.modules, "TorchDynamo is imported"
from diffusers.hooks.group_offloading import ModuleGroup
from diffusers.models.transformers.transformer_wan import WanTransformerBlock
from transformers.masking_utils import TransformGetItemToIndex
class Nothing:
    def _onload_from_disk(self): return None
    _onload_from_memory = _onload_from_disk
    offload_to_disk_path = None
def disabled(x):
    ModuleGroup.onload_(Nothing())
    return x * 2
try:
    torch.compile(disabled, backend="eager", fullgraph=True)(torch.ones(1))
except torch._dynamo.exc.Unsupported:
    pass
else:
    raise AssertionError("disable")
from torch._dynamo import trace_rules
assert trace_rules.is_callable_allowed(WanTransformerBlock), "allow_in_graph"
alone = torch._dynamo._trace_wrapped_higher_order_op
assert alone.TransformGetItemToIndex is TransformGetItemToIndex, "the module that was imported alone"
assert alone is sys.modules["torch._dynamo._trace_wrapped_higher_order_op"]
""")


@pytest.mark.slow
def test_what_else_a_package_needs_of_dynamo_is_there(tmp_path: Path) -> None:
    # accelerate imports it beside transformers.
    package = tmp_path / "google"
    package.mkdir()
    (package / "__init__.py").write_text(
        "import torch._dynamo.config\n"
        "from torch._dynamo import is_compiling\n"
        "from torch._dynamo.utils import counters\n"
    )
    run(
        """
import sys
import runtime.upstream.libraries
import google, torch, torch._dynamo
assert google.is_compiling is torch._dynamo.is_compiling
assert sys.modules["torch._dynamo.config"] is torch._dynamo.config is google.torch._dynamo.config
assert sys.modules["torch._dynamo.utils"] is torch._dynamo.utils and torch._dynamo.utils.counters is google.counters
from diffusers.models.transformers.transformer_wan import WanTransformerBlock
assert torch._dynamo.trace_rules.is_callable_allowed(WanTransformerBlock)
""",
        tmp_path,
    )


@pytest.mark.slow
def test_hidden_packages_are_used_where_they_are_asked_for(tmp_path: Path) -> None:
    for name in ("scipy", "scipy/stats"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").touch()
    (tmp_path / "scipy" / "stats" / "__init__.py").write_text(
        "class beta:\n    @staticmethod\n    def ppf(q, a, b):\n        return q\n"
    )
    metadata = tmp_path / "scipy-9.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: scipy\nVersion: 9.0\n")
    run(
        """
import sys
from runtime.upstream.libraries import diffusers
from runtime.upstream.diffusers import use_scipy
kind = diffusers.FlowMatchEulerDiscreteScheduler
assert "scipy" not in sys.modules, "scipy is imported"
use_scipy(kind)
scheduler = kind(use_beta_sigmas=True)
scheduler.set_timesteps(4)
assert len(scheduler.sigmas) == 5
""",
        tmp_path,
    )
