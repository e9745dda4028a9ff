"""A job imports only what it needs, whatever else is installed: imports are most of the time before the first step."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Packages that diffusers, transformers or accelerate import where they are installed, and no job needs.
OPTIONAL = {
    "peft": "peft",
    "bitsandbytes": "bitsandbytes",
    "scikit-learn": "sklearn",
    "scipy": "scipy",
    "torchaudio": "torchaudio",
    "torchvision": "torchvision",
}
# Everything else than the standard library that a job of the shipped model may import on a CPU.
ALLOWED = {
    "runtime",
    *("torch", "torchgen", "numpy", "safetensors", "PIL", "imageio_ffmpeg"),
    *("diffusers", "transformers", "accelerate", "tokenizers", "huggingface_hub", "gguf", "ftfy", "wcwidth", "regex"),
    # The command line, plans, the store.
    *("typer", "rich", "shellingham", "pydantic", "pydantic_core", "annotated_doc", "annotated_types"),
    *("typing_extensions", "typing_inspection", "psutil", "filelock", "packaging", "tqdm"),
    # What huggingface_hub, diffusers and transformers import for downloads and chat templates, in several releases.
    *("requests", "urllib3", "charset_normalizer", "idna", "certifi", "httpx", "httpcore", "httpx2", "httpcore2"),
    *("anyio", "sniffio", "h11", "h2", "truststore", "exceptiongroup", "socksio", "brotli", "zstandard", "click"),
    *("yaml", "jinja2", "markupsafe", "hf_xet", "importlib_metadata", "zipp", "google"),
}
# Compiled modules, and those of the interpreter, which are outside of packages.
OUTSIDE = {
    "__main__",
    "__mp_main__",
    "_distutils_hack",
    "_brotli",
    "_yaml",
    "_cffi_backend",
    "cython_runtime",
    "google",
}
# Parts of those packages that take as long as whole libraries.
HEAVY = (
    *("torch._inductor", "torch.distributed.tensor", "torch.distributed.fsdp", "torch.distributed.checkpoint"),
    *("torch.onnx", "torch._export.serde", "diffusers.pipelines", "diffusers.models.unets.unet_2d_condition"),
    *("diffusers.models.transformers.transformer_allegro", "transformers.models.bert", "transformers.models.clip"),
    *("transformers.image_processing_backends", "transformers.pipelines", "transformers.trainer"),
)
_RUN = """
import importlib.metadata, importlib.util, json, sys
from runtime.cli.main import run
code = run(sys.argv[1:])
imported = sorted(sys.modules)
with open("imported.json", "w") as file:
    json.dump([code, imported, {name: importlib.metadata.version(name) for name in json.loads(sys.stdin.read())}], file)
"""


@pytest.mark.slow
@pytest.mark.usefixtures("cache_dir")
def test_a_job_imports_only_what_it_needs(tmp_path: Path) -> None:
    installed = tmp_path / "packages"
    for distribution, package in OPTIONAL.items():
        (installed / package).mkdir(parents=True)
        (installed / package / "__init__.py").write_text("__version__ = '99.0'\n")
        metadata = installed / f"{distribution.replace('-', '_')}-99.0.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 99.0\n")
        (metadata / "top_level.txt").write_text(f"{package}\n")
    size = ["--width", "96", "--height", "64", "--frames", "5", "--steps", "1"]
    options = [*size, "--backend", "all=pytorch", "--seed", "1", "--out", str(tmp_path / "boat.mp4")]
    done = subprocess.run(
        [sys.executable, "-c", _RUN, "generate", "a red boat", *options],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(installed), str(ROOT)])},
        input=json.dumps(list(OPTIONAL)),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    code, imported, versions = json.loads((tmp_path / "imported.json").read_text())
    assert code == 0, done.stderr
    assert versions == dict.fromkeys(OPTIONAL, "99.0"), "the packages are installed"
    packages = {name.partition(".")[0] for name in imported} - set(sys.stdlib_module_names) - OUTSIDE
    assert {name for name in packages if not name.startswith(("_sysconfigdata", "_cython"))} <= ALLOWED
    assert [name for name in imported for heavy in HEAVY if name == heavy or name.startswith(f"{heavy}.")] == []
    # One module, which imports no other of its package.
    assert [name for name in imported if name.startswith("torch._dynamo")] == [
        "torch._dynamo._trace_wrapped_higher_order_op"
    ]
