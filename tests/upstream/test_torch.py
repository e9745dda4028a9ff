"""PyTorch's private names that `runtime.upstream.torch` uses: each test names what broke."""

import inspect
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch._inductor import codecache
from torch.utils import cpp_extension

from runtime.upstream import torch as private


def test_the_recompile_limit_is_a_setting_of_dynamo() -> None:
    before = torch._dynamo.config.recompile_limit
    with private.recompile_limit(3):
        assert torch._dynamo.config.recompile_limit == 3
    assert torch._dynamo.config.recompile_limit == before


def test_hitting_the_recompile_limit_is_recognised() -> None:
    compiled = torch.compile(lambda x: x + 1, backend="eager", fullgraph=True, dynamic=False)
    with private.recompile_limit(1):
        compiled(torch.ones(2))
        with pytest.raises(Exception) as full:
            compiled(torch.ones(3))
    assert private.hit_recompile_limit(full.value)
    assert not private.hit_recompile_limit(RuntimeError("RecompileLimit"))
    torch.compiler.reset()


def test_the_digests_of_the_compilers_source_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    private.import_compiler()
    monkeypatch.setattr(codecache, "build_code_hash", None)
    assert codecache.torch_key()


@pytest.mark.slow
@pytest.mark.compiler
def test_graphs_from_the_cache_are_told_from_those_that_were_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    for wanted in (private.CompiledGraphs(compiled=1), private.CompiledGraphs(cached=1)):
        torch.compiler.reset()
        before = private.compiled_graphs()
        with torch.no_grad():
            torch.compile(lambda x: torch.sin(x) * 3 + 1, fullgraph=True, dynamic=False)(torch.ones(7))
        assert private.compiled_graphs().since(before) == wanted
    torch.compiler.reset()


def test_page_locked_memory_can_be_returned() -> None:
    assert hasattr(torch.accelerator, "empty_host_cache") or hasattr(torch._C, "_host_emptyCache")


@pytest.mark.parametrize(
    ("raised", "broken"),
    [
        (None, False),
        (torch.AcceleratorError("CUDA error: an illegal memory access was encountered"), True),
        (RuntimeError("CUDA error: unspecified launch failure"), True),
        (torch.OutOfMemoryError("CUDA out of memory."), False),
        (RuntimeError("CUDA error: out of memory"), False),
    ],
)
def test_errors_that_leave_cuda_unusable(
    raised: Exception | None, broken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def synchronize(_: object) -> None:
        if raised is not None:
            raise raised

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    assert private.cuda_failure("cpu") is None
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert (private.cuda_failure("cpu") is raised) == broken if raised else private.cuda_failure("cpu") is None


def test_attention_kernels_have_names() -> None:
    q, k, v = torch.randn(3, 1, 2, 5, 8).unbind()
    torch.testing.assert_close(private.flash_attention(q, k, v), F.scaled_dot_product_attention(q, k, v))
    for name in ("_scaled_dot_product_cudnn_attention", "_scaled_dot_product_flash_attention"):
        assert hasattr(torch.ops.aten, name), name
    schema = torch.ops.aten._scaled_dot_product_cudnn_attention.default._schema
    assert [one.name for one in schema.arguments[:5]] == ["query", "key", "value", "attn_bias", "compute_log_sumexp"]


def test_a_module_loses_its_parameters() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    inner = module[0]
    private.clear_module(module)
    assert not list(module.parameters()) and not list(module.buffers()) and not list(module.children())
    assert not list(inner.parameters())


def test_shapes_are_computed_without_memory() -> None:
    linear = torch.nn.Linear(4, 3)
    with private.without_computing(real_weights=True) as mode:
        out = linear(mode.from_tensor(torch.ones(2, 4)))
    assert out.shape == (2, 3)


def test_inductor_compiles_packages_and_loads_their_libraries() -> None:
    parameters = inspect.signature(torch._inductor.aoti_compile_and_package).parameters
    assert {"package_path", "inductor_configs"} <= parameters.keys()
    runner = torch._C._aoti.AOTIModelContainerRunnerCpu
    for name in ("run", "get_constant_names_to_original_fqns", "update_constant_buffer"):
        assert hasattr(runner, name), name
    assert isinstance(private.inductor_cache(), Path)
    with private.torch_found_in(Path("/elsewhere")):
        assert cpp_extension.TORCH_LIB_PATH == "/elsewhere/lib"
        assert all(path.startswith("/elsewhere/") for path in cpp_extension.include_paths("cpu"))
    from torch._inductor.exc import CppCompileError, InductorError

    assert issubclass(CppCompileError, Exception) and issubclass(InductorError, Exception)


def test_nested_inputs_are_flattened_and_nested_again() -> None:
    leaves, unflatten = private.flattened(((1, [2]), {"a": 3}))
    assert leaves == [1, 2, 3]
    assert unflatten([4, 5, 6]) == ((4, [5]), {"a": 6})
