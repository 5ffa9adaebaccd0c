"""The kernels of routed layers on a GPU: the sizes of real models, equal bits, and a CUDA graph whose choice changes."""

from types import ModuleType
from typing import Any

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

DEVICE = "cuda"
SIZES = {"qwen3-30b": (128, 8, 1536, 2048), "gpt-oss-20b": (32, 4, 5760, 2880), "mixtral-8x7b": (8, 2, 28672, 4096)}
"""Experts, how many of them a token has, and the output and input features of gate and up."""
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
