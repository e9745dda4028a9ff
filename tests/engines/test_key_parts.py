"""The parts of an engine's key: digests, device, versions, revision of the exported code."""

import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from runtime.core.errors import ModelError
from runtime.engines import key_parts
from runtime.engines.block_programs import BlockProgram
from runtime.engines.builders import BUILDERS
from runtime.engines.key_parts import (
    architecture_digest,
    device_text,
    export_revision,
    program_key_parts,
    versions_of,
)
from runtime.engines.programs import load_program
from runtime.machine.probe import cpu_instructions, probe
from runtime.models.registry import FAMILIES, Entry, family_of, read_spec
from runtime.models.spec import ModelSpec
from runtime.planner.choice.engine_index import SWAPPED, EngineKey, ShapeProfile
from tests.engines.engine_files import refusal


@pytest.fixture
def copied(tiny: Callable[[str], ModelSpec], tmp_path: Path) -> ModelSpec:
    """Return a model that may be changed."""
    shutil.copytree(tiny("wan2.2-a14b").directory, tmp_path / "model")
    return read_spec(tmp_path / "model", "model")


def test_experts_share_an_architecture_and_not_their_weights(copied: ModelSpec) -> None:
    high = program_key_parts(copied, "transformer", "transformer")
    low = program_key_parts(copied, "transformer_2", "transformer")
    assert high[0] == low[0]
    assert high[1] != low[1]
    assert {name for component in copied.component_names for name in copied.programs[component]} == {
        "text_encoder",
        "transformer",
        "vae_first",
        "vae_next",
    }


def test_weights_change_the_digest_and_comments_do_not(copied: ModelSpec, tmp_path: Path) -> None:
    before = program_key_parts(copied, "vae", "vae_next", tmp_path)
    config = copied.directory / "vae" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"_name_or_path": "elsewhere"}))
    assert program_key_parts(copied, "vae", "vae_next", tmp_path) == before
    weights = next((copied.directory / "vae").glob("*.safetensors"))
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    after = program_key_parts(copied, "vae", "vae_next", tmp_path)
    assert after[0] == before[0]
    assert after[1] != before[1]


def test_stored_digests_are_reused(copied: ModelSpec, tmp_path: Path) -> None:
    weights = next((copied.directory / "vae").glob("*.safetensors"))
    before = program_key_parts(copied, "vae", "vae_first", tmp_path)
    stat = weights.stat()
    weights.write_bytes(bytes(stat.st_size))
    os.utime(weights, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert program_key_parts(copied, "vae", "vae_first", tmp_path) == before
    assert program_key_parts(copied, "vae", "vae_first") != before


def test_weights_that_an_engine_does_not_hold_are_not_read(copied: ModelSpec) -> None:
    for weights in (copied.directory / "transformer").glob("*.safetensors"):
        weights.unlink()
        weights.mkdir()  # cannot be read

    def key(builder: str, program: str) -> EngineKey:
        return BUILDERS[builder].key(
            copied,
            "transformer",
            program,
            (ShapeProfile.fixed((1, 1, 1)),),
            precision="float32",
            machine=probe(),
            device="cpu",
        )

    assert key("onnxruntime_blocks", "block_qkv").weights == SWAPPED
    with pytest.raises(ModelError):
        key("onnxruntime", "transformer")


def test_a_block_program_depends_on_the_sizes_of_blocks_only(copied: ModelSpec) -> None:
    """A key without a value that changes the program would make an engine run another model wrongly."""

    def described(spec: ModelSpec, program: str) -> tuple[str, Any, list[torch.Tensor]]:
        loaded = load_program(spec, "transformer", program, device="cpu", dtype="float32")
        assert isinstance(loaded, BlockProgram)
        inputs = loaded.inputs_for(4)
        shapes = {name: (tensor.shape, tensor.dtype) for name, tensor in inputs.items()}
        return architecture_digest(spec, "transformer", program), shapes, list(loaded.run(**inputs).values())

    for program in copied.block_programs:
        digest, shapes, outputs = described(copied, program)
        transformer: Any = copied.transformer
        for field in fields(transformer):
            value = getattr(transformer, field.name)
            changed = tuple(size * 2 for size in value) if isinstance(value, tuple) else (value or 8) * 2
            other = replace(copied, transformer=replace(transformer, **{field.name: changed}))
            if field.name in {"num_attention_heads", "attention_head_dim", "ffn_dim"}:
                assert architecture_digest(other, "transformer", program) != digest
                continue
            same, other_shapes, other_outputs = described(other, program)
            assert (same, other_shapes) == (digest, shapes)
            assert all(map(torch.equal, outputs, other_outputs))


@pytest.mark.parametrize("stored", ["{", "[]", '{"x": 1}'])
def test_damaged_digest_file_is_rewritten(copied: ModelSpec, tmp_path: Path, stored: str) -> None:
    wanted = program_key_parts(copied, "vae", "vae_first")
    (tmp_path / "weights.json").write_text(stored)
    assert program_key_parts(copied, "vae", "vae_first", tmp_path) == wanted
    assert len(json.loads((tmp_path / "weights.json").read_text())) in {1, 2}


def test_unwritable_digest_file_is_ignored(copied: ModelSpec, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert program_key_parts(copied, "vae", "vae_first", tmp_path / "file") == program_key_parts(
        copied, "vae", "vae_first"
    )


def test_cpu_is_identified_by_its_instruction_sets() -> None:
    text = device_text(probe(), "cpu")
    assert text.split()[1:] == [*cpu_instructions()]
    with refusal("engine.no_such_gpu") as refused:
        device_text(probe(), "cuda:7")
    assert refused.value.data["device"] == "cuda:7"


def test_versions_of_installed_packages() -> None:
    assert [name for name, _ in versions_of("torch", "no-such-package")] == ["torch"]
    assert "+" not in versions_of("torch")[0][1]


SPEC = "from runtime.models.registry import Family\nFAMILY = type('Own', (Family,), {})()\n"


def test_export_revision_depends_on_code_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def revision(name: str, source: str) -> str:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "__init__.py").touch()
        (folder / "spec.py").write_text(SPEC)
        (folder / "programs.py").write_text(source, encoding="utf-8")
        monkeypatch.setitem(FAMILIES, name, Entry(("Pipeline",), name))
        return export_revision(name)

    monkeypatch.syspath_prepend(tmp_path)
    first = revision("family_one", 'def form(x: int) -> int:\n    """Add one."""\n    return x + 1\n')
    assert re.fullmatch("[0-9a-f]{16}", first)
    assert revision("family_two", "def form( x: int ) -> int: # other words\n    return (x + 1)\n") == first
    assert revision("family_three", "def form(x: int) -> int:\n    return x + 2\n") != first
    assert export_revision("wan") not in {first, "1"}


def test_export_revision_covers_the_programs_of_shared_families(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = type(family_of("framepack"))
    both = export_revision("framepack")
    export_revision.cache_clear()
    monkeypatch.setattr(alone, "shared_programs", ())
    assert export_revision("framepack") != both
    export_revision.cache_clear()


CODE = (
    "programs.py",
    "component_programs.py",
    "block_programs.py",
    "clip_layers.py",
    "signatures.py",
    "fp8.py",
    "tensorrt_operators.py",
)


@pytest.mark.parametrize("module", CODE)
def test_export_revision_covers_code_that_families_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str
) -> None:
    before = export_revision("wan")
    for name in CODE:
        shutil.copy(Path(key_parts.__file__).with_name(name), tmp_path)
    monkeypatch.setattr(key_parts, "__file__", str(tmp_path / "key_parts.py"))
    # Without the cache.
    revision: Callable[[str], str] = export_revision.__wrapped__
    assert revision("wan") == before
    with (tmp_path / module).open("a", encoding="utf-8") as file:
        file.write("\nCHANGED = True\n")
    assert revision("wan") != before
