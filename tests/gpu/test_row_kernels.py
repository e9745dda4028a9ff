"""Triton's kernels of a transformer's operations on a GPU, at the sizes of large models, and FP8 layers with them."""

from typing import Any

import pytest
import torch
from diffusers import WanTransformer3DModel

from runtime.core.plan import EAGER, ComponentPlan
from runtime.families.wan.components import row_calls
from runtime.families.wan.transformer import install
from runtime.models import row_operations
from runtime.models.quantization import FP8_DATA, FP8_SCALE, fp8_tensor, fp8_weight, install_fp8_linear, linear_of_gelu
from runtime.models.row_operations import computed
from tests.gpu.errors import relative_error
from tests.published_specs import TRANSFORMERS, spec

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU and a CUDA build of PyTorch"),
]
TOKENS, WIDTH, HEADS = 2100, 5120, 40


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that fails is an error."""

    class Failed(list[str]):
        def append(self, item: str) -> None:
            raise AssertionError(item)

    monkeypatch.setattr(row_operations, "_FAILED", Failed())


def random(*size: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(size, device="cuda", dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_kernels_round_as_pytorch(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    x, y = random(1, TOKENS, WIDTH, dtype=dtype), random(1, TOKENS, WIDTH, dtype=dtype)
    for rows in (1, TOKENS):
        tables = random(2, 1, rows, WIDTH, dtype=torch.float32)
        tolerance = 1e-6 if dtype == torch.float32 else 4e-3
        for plain, arguments in (
            (row_operations.layer_norm, (x, *tables, 1e-6, dtype)),
            (row_operations.add_gated, (x, y, tables[0])),
        ):
            assert relative_error(computed(plain, *arguments), plain(*arguments)) < tolerance
    angles = random(2, 1, TOKENS, 1, WIDTH // HEADS, dtype=torch.float32)
    arguments = x.unflatten(2, (HEADS, -1)), *angles
    assert (
        relative_error(computed(row_operations.rotate_pairs, *arguments), row_operations.rotate_pairs(*arguments))
        < 4e-3
    )
    scale = torch.tensor(80.0, device="cuda")
    rounded = computed(row_operations.to_fp8, x, scale)
    assert torch.equal(rounded.float(), row_operations.to_fp8(x, scale).float())
    back = computed(row_operations.from_fp8, rounded, scale, dtype)
    assert relative_error(back, row_operations.from_fp8(rounded, scale, dtype)) < 4e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [2048, 4096])
def test_norms_and_rotations_round_as_pytorch(width: int, dtype: torch.dtype) -> None:
    torch.manual_seed(4)
    tolerance = 1e-6 if dtype == torch.float32 else 4e-3
    x, y = random(1, TOKENS, width, dtype=dtype), random(1, TOKENS, width, dtype=dtype)
    for timesteps in (1, 2):
        gate, *rows = random(timesteps, 5, width, dtype=torch.float32).unbind(1)
        pairs = [(rows[0], rows[1]), (rows[2], rows[3])]
        sums: list[tuple[Any, ...]] = [(x, y, gate, pairs[:count], 700, 1e-6) for count in range(3)]
        for arguments in (*sums, (x, None, None, pairs[:1], 700, 1e-6), (x, y, None, [None], 0, 1e-6)):
            results = zip(
                computed(row_operations.add_norms, *arguments, fewest=0),
                row_operations.add_norms(*arguments),
                strict=True,
            )
            assert all(relative_error(got, wanted) < tolerance for got, wanted in results)
    wide, weight = random(1, TOKENS, 3 * width, dtype=dtype), random(width, dtype=dtype)
    cos, sin = random(2, 1, TOKENS, width // 2, dtype=torch.float32)
    for distance in (1, 32, 64):
        for part in wide.split(width, dim=2):
            angles = (weight, 1e-6, cos, sin, distance)
            got = computed(row_operations.norm_rotate, part, *angles, fewest=0)
            assert relative_error(got, row_operations.norm_rotate(part, *angles)) < tolerance


@pytest.mark.parametrize("width", [WIDTH, 13_824])
def test_rows_are_rounded_as_by_pytorch(width: int) -> None:
    torch.manual_seed(2)
    x = random(TOKENS, width)
    for plain, share in ((row_operations.quantize_rows, 1e-3), (row_operations.quantize_gelu_rows, 0.02)):
        (rounded, scales), (wanted, wanted_scales) = computed(plain, x), plain(x)
        torch.testing.assert_close(scales, wanted_scales, rtol=1e-6 if share < 0.01 else 0.01, atol=1e-5)
        # Division by a scale may differ in the last bit, and GELU too, and with it a few of the roundings.
        assert (rounded.float() != wanted.float()).float().mean().item() < share


def test_a_layer_in_fp8_computes_as_torchaos() -> None:
    pytest.importorskip("torchao")
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs a GPU that computes in FP8")
    torch.manual_seed(3)
    layer = torch.nn.Linear(WIDTH, 2 * WIDTH, device="cuda", dtype=torch.bfloat16).requires_grad_(False)
    layer.weight = torch.nn.Parameter(fp8_weight(layer.weight.data), requires_grad=False)
    x = random(1, TOKENS, WIDTH)
    wanted = torch.nn.functional.linear(x, layer.weight, layer.bias)
    exact = x.float() @ (fp8_tensor(layer.weight, FP8_DATA).float() * fp8_tensor(layer.weight, FP8_SCALE)).t()
    exact += layer.bias.float()
    install_fp8_linear(layer)
    got = layer(x)
    assert (got.dtype, got.shape) == (wanted.dtype, wanted.shape)
    assert relative_error(got, exact) < 1.05 * relative_error(wanted, exact)
    activated = layer(torch.nn.functional.gelu(x, approximate="tanh"))
    assert relative_error(linear_of_gelu(layer, x), activated) < 0.01
    # Few rows are rounded by torchao, whose scales have 16 bits.
    assert relative_error(layer(x[:, :7]), exact[:, :7]) < 1.1 * relative_error(wanted, exact)


def test_kernels_compiled_ahead_are_those_of_a_block() -> None:
    from runtime.models import row_kernels  # needs Triton

    tokens = 1100
    config = {**TRANSFORMERS["wan2.2-a14b"], "num_layers": 1}
    with torch.device("cuda"):
        model = WanTransformer3DModel(**config).to(torch.bfloat16).requires_grad_(False)
    install(model)
    kernels = row_kernels._norm_kernel, row_kernels._add_kernel, row_kernels._rotate_kernel

    part = ComponentPlan(backend="pytorch", device="cuda", dtype="bfloat16", weights_bytes=0, reasons=())

    def compiled() -> int:
        return sum(len(kernel.device_caches[torch.cuda.current_device()][0]) for kernel in kernels)

    row_operations.compile_kernels(row_calls(spec("wan2.2-a14b"), part, EAGER), "cuda")
    before = compiled()
    latents = random(1, model.config.in_channels, 1, 2 * 25, 2 * tokens // 25)
    model(latents, torch.tensor([500.0], device="cuda"), random(1, 512, model.config.text_dim), return_dict=False)
    assert before >= len(kernels)
    assert compiled() == before
