"""Tests of the compiled row kernels against torch on the GPU, at the sizes of a real model."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch.nn import functional

from graftwork.engine.build.kernels import choose_row_ops
from graftwork.engine.model.config import ModelConfig
from graftwork.engine.model.rope_config import RopeConfig
from graftwork.engine.model.rotary import RotaryTable
from graftwork.engine.runner.row_ops import TorchRowOps, rms_norm
from tests.engine.runner.row_sides import MODEL, NUM_FRAMES, batch_of, side

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

CUDA = torch.device("cuda", 0)
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
ROUNDING = {torch.float32: 2e-6, torch.float16: 2**-10, torch.bfloat16: 2**-7}
LARGE = replace(MODEL, hidden_size=4096, intermediate_size=14336, num_heads=32, num_kv_heads=8, head_dim=128)
QWEN2 = replace(LARGE, hidden_size=896, intermediate_size=4864, num_heads=14, num_kv_heads=2, head_dim=64)
PHI = replace(LARGE, hidden_size=3072, intermediate_size=8192, num_heads=24, num_kv_heads=8, head_dim=96)
MODELS = pytest.mark.parametrize("model", [LARGE, QWEN2, PHI], ids=["llama-8b", "qwen2-0.5b", "phi-4-mini"])
STEPS = ([(5, 1), (8, 1), (0, 1)], [(3, 9), (7, 1), (0, 9), (11, 1)])
"""Slices (start, tokens): decoding rows alone, and with prompts that begin and fill pages."""


@pytest.fixture(autouse=True)
def _needs_triton() -> None:
    pytest.importorskip("triton", reason="the kernels extra is not installed")


def noise(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(CUDA, dtype)


def test_angles_behind_the_context_are_those_of_torch() -> None:
    """Angles in fp64, of positions up to 2^20, differ from torch's by one rounding of fp32 at most."""
    from graftwork.engine.kernels.angles import Rotation, RowAngles, step_angles_launch

    table = RotaryTable(128, RopeConfig(500_000.0), 4096, CUDA)
    rotation = Rotation(table.frequencies)
    positions = torch.randint(0, 1 << 20, (512,), generator=torch.Generator().manual_seed(4)).to(CUDA, torch.int32)
    rows = RowAngles.empty(rotation, len(positions))

    step_angles_launch(rows, rotation, positions, (table.cosines, table.sines)).run()

    for actual, expected in zip((rows.cosines, rows.sines), table.at(positions.long(), has_far=True), strict=True):
        assert (actual - expected[:, 0]).abs().max() < 1.2e-7


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_trial_at_start_chooses_the_kernels(dtype: torch.dtype) -> None:
    """On a GPU the kernels pass their trial in every dtype, so an engine takes them."""
    from graftwork.engine.runner.triton_row_ops import TritonRowOps

    assert choose_row_ops("triton", MODEL, CUDA, dtype) is TritonRowOps


@MODELS
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("slices", STEPS, ids=["decode", "mixed"])
def test_rotated_rows_have_the_bits_of_torch(
    model: ModelConfig, dtype: torch.dtype, slices: list[tuple[int, int]]
) -> None:
    """Without norms of heads every query and every page has torch's bits, zeros and untouched NaN included."""
    from graftwork.engine.runner.triton_row_ops import TritonRowOps

    kernels, plain = (side(kind, model, dtype, CUDA) for kind in (TritonRowOps, TorchRowOps))
    batch = batch_of(slices, device=CUDA)
    qkv = noise(len(batch.token_ids), (model.num_heads + 2 * model.num_kv_heads) * model.head_dim, dtype=dtype)

    queries = [one.rows.plan(batch).rotate_and_store(qkv.clone(), 1, None) for one in (kernels, plain)]

    assert torch.equal(*queries)
    for layer in (0, 1):
        torch.testing.assert_close(kernels.pages(layer), plain.pages(layer), rtol=0, atol=0, equal_nan=True)


@MODELS
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
@pytest.mark.parametrize("slices", STEPS, ids=["decode", "mixed"])
def test_codes_and_scales_have_the_bits_of_torch(
    model: ModelConfig, dtype: torch.dtype, kv_dtype: str, slices: list[tuple[int, int]]
) -> None:
    """Without norms of heads every code and scale is the one that torch gives on the CPU, zeros and untouched bytes included.
    (On CUDA, torch multiplies by the inverse of the largest code.)"""
    from graftwork.engine.runner.triton_row_ops import TritonRowOps

    kernels = side(TritonRowOps, model, dtype, CUDA, kv_dtype)
    plain = side(TorchRowOps, model, dtype, kv_dtype=kv_dtype)
    shape = (sum(count for _, count in slices), (model.num_heads + 2 * model.num_kv_heads) * model.head_dim)
    qkv = noise(*shape, dtype=dtype)

    for one, own in ((kernels, qkv), (plain, qkv.cpu())):
        one.rows.plan(batch_of(slices, device=own.device)).rotate_and_store(own.clone(), 1, None)

    for layer in (0, 1):
        assert torch.equal(kernels.pages(layer).cpu(), plain.pages(layer))
        assert torch.equal(kernels.scales(layer).cpu(), plain.scales(layer))


@MODELS
@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_of_heads_are_those_of_torch_within_rounding(model: ModelConfig, dtype: torch.dtype) -> None:
    """With norms of heads few values differ from torch's, and then by a rounding of the norm and one of the rotation."""
    from graftwork.engine.runner.triton_row_ops import TritonRowOps

    kernels, plain = (side(kind, model, dtype, CUDA) for kind in (TritonRowOps, TorchRowOps))
    batch = batch_of(STEPS[1], device=CUDA)
    heads = model.num_heads + model.num_kv_heads
    qkv = noise(len(batch.token_ids), (heads + model.num_kv_heads) * model.head_dim, dtype=dtype)
    weight = 1 + noise(heads, model.head_dim, dtype=dtype, seed=1) / 4

    actual, expected = (one.rows.plan(batch).rotate_and_store(qkv.clone(), 0, weight) for one in (kernels, plain))

    torch.testing.assert_close(actual, expected, rtol=2 * ROUNDING[dtype], atol=8 * ROUNDING[dtype])
    assert (actual != expected).float().mean() < (1.0 if dtype == torch.float32 else 0.01)


@pytest.mark.parametrize("num_rows", [1, 32, 700])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("features", [896, 4096, 5120, 16384])
def test_sums_have_the_bits_of_torch_and_norms_are_within_rounding(
    num_rows: int, dtype: torch.dtype, features: int
) -> None:
    """hidden + delta has torch's bits; its norm is within two roundings of fp64, and almost always torch's."""
    from graftwork.engine.runner.triton_row_ops import TritonRowOps

    rows = side(TritonRowOps, replace(MODEL, hidden_size=features), dtype, CUDA).rows
    hidden, delta = (3 * noise(num_rows, features, dtype=dtype, seed=seed) for seed in (1, 2))
    weight = 1 + noise(features, dtype=dtype, seed=3) / 4
    total = hidden + delta

    summed, normed = rows.add_norm(hidden.clone(), delta, weight)

    exact = rms_norm(total.double(), weight.double(), MODEL.rms_norm_eps)
    assert torch.equal(summed, total)
    torch.testing.assert_close(normed.double(), exact, rtol=2 * ROUNDING[dtype], atol=ROUNDING[dtype])
    if dtype != torch.float32:
        assert (normed != rms_norm(total, weight, MODEL.rms_norm_eps)).float().mean() < 0.01
    alone = rows.norm(total[-1:], weight)
    assert torch.equal(alone, normed[-1:])  # a row's bits do not depend on the others


@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [4864, 14336, 1000])
def test_activations_are_those_of_torch_within_rounding(name: str, dtype: torch.dtype, width: int) -> None:
    """Each activation is within two roundings of torch's."""
    from graftwork.engine.kernels.activation import activate_launch

    gate_up = 3 * noise(37, 2 * width, dtype=dtype)
    gate, up = gate_up.chunk(2, dim=1)
    inner = torch.empty(37, width, dtype=dtype, device=CUDA)
    functions: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "silu": functional.silu,
        "gelu": functional.gelu,
        "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    }

    activate_launch(gate_up, inner, name).run()

    torch.testing.assert_close(inner, functions[name](gate) * up, rtol=2 * ROUNDING[dtype], atol=4 * ROUNDING[dtype])


def test_a_captured_step_can_be_replayed_with_other_rows() -> None:
    """A captured graph of all row kernels, refilled with another step of as many rows, gives the bits of that step."""
    from graftwork.engine.runner.triton_row_ops import TritonRowOps

    first, second = (batch_of(slices, device=CUDA) for slices in ([(5, 1), (8, 1), (0, 1)], [(3, 1), (0, 1), (15, 1)]))
    captured, eager = (side(TritonRowOps, LARGE, torch.bfloat16, CUDA) for _ in range(2))
    qkv = noise(3, 48 * 128, dtype=torch.bfloat16)
    hidden, delta = (noise(3, 4096, dtype=torch.bfloat16, seed=seed) for seed in (1, 2))
    weight = noise(4096, dtype=torch.bfloat16, seed=3)

    def step(one: object) -> tuple[torch.Tensor, ...]:
        total, normed = one.rows.add_norm(hidden.clone(), delta, weight)  # type: ignore[attr-defined]
        return total, normed, step_rows.rotate_and_store(qkv, 0, None)

    step_rows = captured.rows.plan(first)
    step(captured)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step(captured)
    for name in ("positions", "row_pages", "row_offsets"):
        getattr(first, name).copy_(getattr(second, name))
    for part in captured.cache.layer(0):
        part[:NUM_FRAMES] = float("nan")
    graph.replay()
    replayed = [one.clone() for one in results]

    step_rows = eager.rows.plan(second)
    for one, other in zip(replayed, step(eager), strict=True):
        assert torch.equal(one, other)
    torch.testing.assert_close(captured.pages(0), eager.pages(0), rtol=0, atol=0, equal_nan=True)
