"""The kernels of routed layers on a GPU, with plain weights and with codes: the sizes of real models, equal bits, and a CUDA
graph whose choice changes.
"""

from types import ModuleType
from typing import Any

import pytest
import torch

from graftwork.engine.quantization.weight import WHOLE_ROW, Codes, QuantizedWeight

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

DEVICE = "cuda"
SIZES = {"qwen3-30b": (128, 8, 1536, 2048), "gpt-oss-20b": (32, 4, 5760, 2880), "mixtral-8x7b": (8, 2, 28672, 4096)}
"""Experts, how many of them a token has, and the output and input features of gate and up."""
FORMS = {
    "mxfp4": (Codes.FLOAT4, 32, False),
    "int4": (Codes.INT4, 128, False),
    "int4 zeros, small groups": (Codes.INT4, 32, True),
    "int8": (Codes.INT8, WHOLE_ROW, False),
    "fp8": (Codes.FLOAT8, WHOLE_ROW, False),
    "fp8 blocks": (Codes.FLOAT8, 128, False),
}
"""The codes, the features of a group, and whether there are zero points."""
ROUNDING = {torch.float32: 1e-5, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}


@pytest.fixture
def launch() -> ModuleType:
    pytest.importorskip("triton", reason="the kernels extra is not installed")
    from graftwork.engine.experts.triton import launch as expert_launches

    return expert_launches


def products(launch: ModuleType, x: torch.Tensor, table: Any, chosen: torch.Tensor) -> torch.Tensor:
    """The products of each choice: [num_tokens, num_chosen, out_features]."""
    rows = launch.empty_rows(launch.TileGrid.of(chosen, len(table.weights)), torch.device(DEVICE))
    for one in launch.arrange_launches(chosen.contiguous(), rows):
        one.run()
    y = torch.full((rows.grid.num_rows, table.out_features), torch.nan, dtype=x.dtype, device=DEVICE)
    launch.multiply_launch(x.index_select(0, rows.tokens), y, table, rows).run()
    found: torch.Tensor = y[rows.places]
    return found


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("name", SIZES)
def test_products_are_exact_with_the_same_bits_in_every_batch(
    launch: ModuleType, name: str, dtype: torch.dtype
) -> None:
    """Decoding steps and prompts of a real layer equal fp64, rounded once, and a token's bits do not follow from others."""
    num_experts, num_chosen, out_features, in_features = SIZES[name]
    generator = torch.Generator(DEVICE).manual_seed(1)
    weights = [
        torch.randn(out_features, in_features, generator=generator, device=DEVICE).to(dtype) for _ in range(num_experts)
    ]
    table = launch.ExpertTable.of(weights, None)
    x = torch.randn(2048, in_features, generator=generator, device=DEVICE).to(dtype)
    chosen = torch.rand(2048, num_experts, generator=generator, device=DEVICE).topk(num_chosen, dim=1).indices

    by_size = {size: products(launch, x[:size], table, chosen[:size]) for size in (1, 7, 64, 2048)}

    for size, found in by_size.items():
        assert torch.equal(found, by_size[2048][:size])
    for token in range(4):
        for place, expert in enumerate(chosen[token].tolist()):
            exact = weights[expert].double() @ x[token].double()
            error = (by_size[2048][token, place].double() - exact).abs().max() / exact.abs().max()
            assert error <= ROUNDING[dtype]


def test_a_graph_computes_another_choice(launch: ModuleType) -> None:
    """A captured graph of arrangement and product serves a step whose choice it has never seen."""
    generator = torch.Generator(DEVICE).manual_seed(2)
    weights = [torch.randn(96, 64, generator=generator, device=DEVICE) for _ in range(8)]
    table, x = launch.ExpertTable.of(weights, None), torch.randn(16, 64, generator=generator, device=DEVICE)
    chosen = torch.zeros(16, 2, dtype=torch.int64, device=DEVICE)
    chosen[:, 1] = 1
    products(launch, x, table, chosen)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = products(launch, x, table, chosen)

    chosen.copy_(torch.rand(16, 8, generator=generator, device=DEVICE).topk(2, dim=1).indices)
    graph.replay()

    expected = torch.einsum("tcoi,ti->tco", torch.stack(weights)[chosen], x)
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-4)


def random_codes(form: str, out_features: int, in_features: int, generator: torch.Generator) -> QuantizedWeight:
    kind, group, has_zeros = FORMS[form]
    groups, shape = (1 if group == WHOLE_ROW else -(-in_features // group)), (out_features, in_features)
    options: dict[str, Any] = {"generator": generator, "device": DEVICE}
    if kind is Codes.FLOAT4:
        codes = torch.randint(0, 16, shape, **options).to(torch.uint8)
        powers = torch.randint(124, 130, (out_features, groups), **options).to(torch.uint8)
        return QuantizedWeight.of(codes, powers, kind=kind, group_size=group)
    scales = 0.5 + torch.rand(out_features, groups, **options)
    if kind is Codes.FLOAT8:
        codes = torch.randn(shape, **options).to(torch.float8_e4m3fn)
        return QuantizedWeight.of(codes, scales, kind=kind, group_size=group)
    most = 8 if kind is Codes.INT4 else 127
    codes = torch.randint(-most, most, shape, **options).to(torch.int8)
    zeros = torch.randint(-most, most, (out_features, groups), **options) if has_zeros else None
    return QuantizedWeight.of(codes, scales, zeros, kind=kind, group_size=group)


def code_products(launch: ModuleType, x: torch.Tensor, table: Any, chosen: torch.Tensor) -> torch.Tensor:
    """The products of each choice: [num_tokens, num_chosen, out_features]."""
    from graftwork.engine.experts.triton.code_launch import CodeExpertProduct

    rows = launch.empty_rows(launch.TileGrid.of(chosen, len(table.packed)), torch.device(DEVICE))
    for one in launch.arrange_launches(chosen.contiguous(), rows):
        one.run()
    y = torch.full((rows.grid.num_rows, table.out_features), torch.nan, dtype=x.dtype, device=DEVICE)
    for one in CodeExpertProduct(x.index_select(0, rows.tokens), table, y, rows).launches():
        one.run()
    found: torch.Tensor = y[rows.places]
    return found


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["qwen3-30b", "gpt-oss-20b"])
def test_products_of_codes_are_exact_with_the_same_bits_in_every_batch(
    launch: ModuleType, name: str, form: str, dtype: torch.dtype
) -> None:
    """Decoding steps and prompts of a real layer of codes equal fp64, rounded once, and a token's bits do not follow from
    others; a graph computes a choice that it has never seen."""
    from graftwork.engine.experts.triton.code_launch import CodeExpertTable
    from graftwork.engine.quantization.triton.products import CodeProducts

    num_experts, num_chosen, out_features, in_features = SIZES[name]
    generator = torch.Generator(DEVICE).manual_seed(1)
    own = [CodeProducts(random_codes(form, out_features, in_features, generator)) for _ in range(num_experts)]
    table = CodeExpertTable.of([one.table for one in own], [None] * num_experts, None)
    x = torch.randn(2048, in_features, generator=generator, device=DEVICE).to(dtype)
    chosen = torch.rand(2048, num_experts, generator=generator, device=DEVICE).topk(num_chosen, dim=1).indices

    by_size = {size: code_products(launch, x[:size], table, chosen[:size]) for size in (1, 7, 64, 2048)}
    captured = chosen[:64].roll(1, 0).contiguous()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found_by_graph = code_products(launch, x[:64], table, captured)
    captured.copy_(chosen[:64])
    graph.replay()

    for size, found in by_size.items():
        assert torch.equal(found, by_size[2048][:size])
    assert torch.equal(found_by_graph, by_size[64])
    for token in range(4):
        for place, expert in enumerate(chosen[token].tolist()):
            exact = own[expert].weight.dense(torch.float32).double() @ x[token].double()
            error = (by_size[2048][token, place].double() - exact).abs().max() / exact.abs().max()
            assert error <= ROUNDING[dtype]
