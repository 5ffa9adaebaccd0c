"""The kernels of routed layers under the interpreter: arrangement against a plain loop, products against fp64."""

from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graftwork.engine.model.layers import Linear
from graftwork.engine.model.mlp_weights import DenseWeights, RoutedWeights

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")
CPU = torch.device("cpu")
ROUNDING = {torch.float32: 1e-6, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-6}
"""The largest error, of the largest value. The interpreter cuts bf16 off instead of rounding it."""


def random_choice(num_tokens: int, num_chosen: int, num_experts: int, seed: int) -> torch.Tensor:
    """Different experts for each token, with some that are far more popular than others."""
    generator = torch.Generator().manual_seed(seed)
    popular = torch.rand(num_tokens, num_experts, generator=generator) * torch.linspace(1, 3, num_experts)
    return popular.topk(num_chosen, dim=1).indices


def arranged(launch: ModuleType, chosen: torch.Tensor, num_experts: int, tile_rows: int | None = None) -> Any:
    """The rows of a choice. Their memory holds wrong numbers before."""
    rows = launch.empty_rows(launch.TileGrid.of(chosen, num_experts, tile_rows), CPU)
    for memory in (rows.tokens, rows.places, rows.tile_expert, rows.tile_start, rows.tile_length):
        memory.fill_(2**30)
    for one in launch.arrange_launches(chosen, rows):
        one.run()
    return rows


@settings(max_examples=12, deadline=None)
@given(
    num_tokens=st.integers(1, 80), num_chosen=st.integers(1, 3), num_experts=st.integers(3, 9), seed=st.integers(0, 9)
)
def test_rows_are_arranged_by_expert_and_token(
    interpreted: dict[str, ModuleType], num_tokens: int, num_chosen: int, num_experts: int, seed: int
) -> None:
    """Rows are sorted by expert and token, each choice knows its row, and tiles cover each row once with one expert."""
    chosen = random_choice(num_tokens, num_chosen, num_experts, seed)
    pairs = sorted((expert, token) for token, experts in enumerate(chosen.tolist()) for expert in experts)

    rows = arranged(interpreted["launch"], chosen, num_experts)

    assert rows.tokens.tolist() == [token for _, token in pairs]
    for token, experts in enumerate(chosen.tolist()):
        assert [pairs[row] for row in rows.places[token].tolist()] == [(expert, token) for expert in experts]
    covered = []
    for expert, start, length in zip(
        rows.tile_expert.tolist(), rows.tile_start.tolist(), rows.tile_length.tolist(), strict=True
    ):
        assert 0 <= length <= rows.grid.tile_rows
        covered += [(row, expert) for row in range(start, start + length)]
    assert covered == [(row, expert) for row, (expert, _) in enumerate(pairs)]


@pytest.mark.parametrize(("num_tokens", "num_chosen", "num_experts"), [(1, 1, 1), (1, 8, 128), (40, 2, 4), (300, 8, 8)])
def test_no_choice_needs_more_tiles_than_the_grid_has(
    interpreted: dict[str, ModuleType], num_tokens: int, num_chosen: int, num_experts: int
) -> None:
    """The worst choice, in which every expert has one row more than whole tiles, or is chosen by few, has a tile for
    each of its rows; the grid follows from the sizes alone."""
    grid = interpreted["launch"].TileGrid(num_tokens, num_chosen, num_experts)
    most = 0
    for seed in range(20):
        counts = torch.bincount(random_choice(num_tokens, num_chosen, num_experts, seed).flatten())
        most = max(most, int((-(-counts // grid.tile_rows)).sum()))
    owners = min(grid.num_rows, num_experts)
    rest, full = divmod(grid.num_rows - owners, grid.tile_rows)

    assert most <= grid.num_tiles
    assert grid.num_tiles == owners + rest
    assert full < grid.tile_rows


def products(launch: ModuleType, x: torch.Tensor, table: Any, rows: Any) -> torch.Tensor:
    """The products of all rows, in memory that held NaN before."""
    y = torch.full((rows.grid.num_rows, table.out_features), torch.nan, dtype=x.dtype)
    launch.multiply_launch(x[rows.tokens], y, table, rows).run()
    return y


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize(("num_tokens", "has_biases"), [(5, True), (150, False)])
@pytest.mark.parametrize(("out_features", "in_features"), [(72, 136), (40, 24)])
def test_products_are_those_of_each_expert(
    interpreted: dict[str, ModuleType],
    dtype: torch.dtype,
    num_tokens: int,
    has_biases: bool,
    out_features: int,
    in_features: int,
) -> None:
    """Each row is its token's product with its expert's weight in fp64, rounded once, for tiles of both sizes."""
    launch, generator = interpreted["launch"], torch.Generator().manual_seed(4)
    weights = torch.randn(3, out_features, in_features, generator=generator).to(dtype)
    biases = torch.randn(3, out_features, generator=generator).to(dtype)
    x, chosen = torch.randn(num_tokens, in_features, generator=generator).to(dtype), random_choice(num_tokens, 2, 3, 5)
    table = launch.ExpertTable.of(list(weights), list(biases) if has_biases else None)
    rows = arranged(launch, chosen, 3)
    exact = torch.einsum("tcoi,ti->tco", weights.double()[chosen], x.double())
    exact += biases.double()[chosen] if has_biases else 0.0

    found = products(launch, x, table, rows)[rows.places]

    assert rows.grid.tile_rows == (32 if num_tokens == 150 else 16)
    assert (found.double() - exact).abs().max() <= ROUNDING[dtype] * exact.abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_neighbours_do_not_change_a_bit(interpreted: dict[str, ModuleType], dtype: torch.dtype) -> None:
    """A token's rows have the same bits alone, among few and among many, where tiles are larger and others choose its
    experts."""
    launch, generator = interpreted["launch"], torch.Generator().manual_seed(6)
    weights = list(torch.randn(3, 40, 264, generator=generator).to(dtype))
    table = launch.ExpertTable.of(weights, None)
    x, chosen = torch.randn(130, 264, generator=generator).to(dtype), random_choice(130, 2, 3, 7)

    def of_token(token: int, first: int, end: int) -> torch.Tensor:
        rows = arranged(launch, chosen[first:end].contiguous(), 3)
        return products(launch, x[first:end], table, rows)[rows.places[token - first]]

    for token in (0, 64, 129):
        alone = of_token(token, token, token + 1)
        assert torch.equal(of_token(token, 0, 130), alone)
        assert torch.equal(of_token(token, max(token - 3, 0), token + 1), alone)


def test_a_layer_of_experts_computes_what_the_loop_computes(interpreted: dict[str, ModuleType]) -> None:
    """Kernels and the loop give each token the same mixture of its experts, and tell the same rows to the host."""
    from graftwork.engine.experts.expert_loop import ExpertLoop

    generator = torch.Generator().manual_seed(8)
    experts = tuple(
        DenseWeights(
            Linear(torch.randn(48, 32, generator=generator), torch.randn(48, generator=generator)),
            Linear(torch.randn(32, 24, generator=generator), torch.randn(32, generator=generator)),
        )
        for _ in range(5)
    )
    weights = RoutedWeights(Linear(torch.ones(16, 32)), None, experts, None)
    x, chosen, shares = torch.randn(9, 32, generator=generator), random_choice(9, 2, 5, 9), torch.rand(9, 2)
    found = []
    for kind in (ExpertLoop, interpreted["backend"].TritonExperts):
        rows = kind(weights).arrange(chosen, shares)
        inner = rows.multiply(x[rows.tokens], "experts_gate_up")[:, :24]
        found.append((rows.combined(rows.multiply(inner, "experts_down")), rows.host))

    torch.testing.assert_close(found[0][0], found[1][0], atol=1e-4, rtol=1e-5)
    assert found[0][1].tokens.tolist() == found[1][1].tokens.tolist()
    assert found[0][1].experts.tolist() == found[1][1].experts.tolist()
    assert found[1][1].rows.tolist() == list(range(18))


def test_what_does_not_fit_is_refused(interpreted: dict[str, ModuleType]) -> None:
    """Shapes, strides and dtypes that the kernels cannot read are errors, not wrong results."""
    launch = interpreted["launch"]
    rows = arranged(launch, random_choice(4, 2, 3, 1), 3)
    table = launch.ExpertTable.of([torch.ones(8, 16)] * 3, None)

    with pytest.raises(ValueError, match=r"do not fit 8 rows of experts with 16 input and 8 output"):
        launch.multiply_launch(torch.ones(8, 8), torch.ones(8, 8), table, rows)
    with pytest.raises(ValueError, match="adjacent in memory"):
        launch.multiply_launch(torch.ones(16, 8).t(), torch.ones(8, 8), table, rows)
    with pytest.raises(ValueError, match="contiguous and of one dtype"):
        launch.ExpertTable.of([torch.ones(8, 16), torch.ones(8, 16).half()], None)
    with pytest.raises(ValueError, match="must be contiguous and have the shape of the grid"):
        launch.arrange_launches(torch.ones(2, 4, dtype=torch.int64).t(), rows)
