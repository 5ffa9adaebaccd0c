"""The kernels of experts with codes under the interpreter: products against fp64, and bits that are a row's own."""

from collections.abc import Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch

from graftwork.engine.experts.expert_loop import ExpertLoop
from graftwork.engine.model.layers import Linear
from graftwork.engine.model.mlp_weights import AnyLinear, DenseWeights, RoutedWeights
from graftwork.engine.quantization.linear import QuantizedLinear, StepKinds
from graftwork.engine.quantization.triton.selftest import rounded_rows
from graftwork.engine.quantization.weight import WHOLE_ROW, Codes, QuantizedWeight
from tests.engine.experts.triton.test_kernels import ROUNDING, arranged, random_choice
from tests.engine.quantization.test_products import random_weight

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")
NUM_EXPERTS = 3
FORMS = {
    "mxfp4": (Codes.FLOAT4, 32),
    "int4": (Codes.INT4, 128),
    "int4, small groups": (Codes.INT4, 32),
    "int4, large groups": (Codes.INT4, 256),
    "int8": (Codes.INT8, WHOLE_ROW),
    "int8 groups": (Codes.INT8, 64),
    "fp8": (Codes.FLOAT8, WHOLE_ROW),
    "fp8 blocks": (Codes.FLOAT8, 128),
}
"""By name: the codes, which have zero points if they are integers, and the features of a group."""


def weights_of(form: str, out_features: int, in_features: int, *, sort: bool = False) -> list[QuantizedWeight]:
    kind, group = FORMS[form]
    return [random_weight(kind, out_features, in_features, group, seed=seed, sort=sort) for seed in range(NUM_EXPERTS)]


def table_of(
    interpreted: dict[str, ModuleType], weights: Sequence[QuantizedWeight], biases: Sequence[torch.Tensor] | None = None
) -> Any:
    products = [interpreted["codes"].CodeProducts(weight) for weight in weights]
    tables, orders = [one.table for one in products], [one.weight.order for one in products]
    return interpreted["code_launch"].CodeExpertTable.of(tables, orders, biases)


def products(interpreted: dict[str, ModuleType], x: torch.Tensor, table: Any, chosen: torch.Tensor) -> torch.Tensor:
    """The products of each choice, in memory that held NaN before, between columns that stay as they are."""
    rows = arranged(interpreted["launch"], chosen, NUM_EXPERTS)
    wide = torch.full((rows.grid.num_rows, table.out_features + 2), torch.nan, dtype=x.dtype)
    for launch in interpreted["code_launch"].CodeExpertProduct(x[rows.tokens], table, wide[:, 1:-1], rows).launches():
        launch.run()
    assert wide[:, 0].isnan().all()
    assert wide[:, -1].isnan().all()
    return wide[:, 1:-1][rows.places]


def exact_products(weights: Sequence[QuantizedWeight], x: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    dense = torch.stack([weight.dense(torch.float64) for weight in weights])
    return torch.einsum("tcoi,ti->tco", dense[chosen], x.double())


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("num_tokens", "has_biases", "out_features", "in_features"), [(5, True, 72, 288), (100, False, 37, 160)]
)
def test_products_are_those_of_the_values(
    interpreted: dict[str, ModuleType],
    form: str,
    num_tokens: int,
    has_biases: bool,
    out_features: int,
    in_features: int,
) -> None:
    """Each row is its token's product with its expert's values in fp64, for tiles of both sizes."""
    weights, generator = weights_of(form, out_features, in_features), torch.Generator().manual_seed(4)
    x, biases = (torch.randn(*shape, generator=generator) for shape in ((num_tokens, in_features), (3, out_features)))
    chosen = random_choice(num_tokens, 2, NUM_EXPERTS, 5)
    exact = exact_products(weights, x, chosen) + (biases.double()[chosen] if has_biases else 0.0)

    found = products(interpreted, x, table_of(interpreted, weights, list(biases) if has_biases else None), chosen)

    assert (found - exact).abs().max() <= 3 * ROUNDING[torch.float32] * exact.abs().max()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("form", ["mxfp4", "int4, small groups", "int8", "fp8 blocks"])
def test_products_in_16_bits_are_rounded_once(
    interpreted: dict[str, ModuleType], form: str, dtype: torch.dtype
) -> None:
    """Rows and biases in 16 bits give the product in fp64, rounded once: neither codes nor scales are rounded."""
    weights, generator = weights_of(form, 72, 288), torch.Generator().manual_seed(2)
    x, biases = (torch.randn(*shape, generator=generator).to(dtype) for shape in ((6, 288), (3, 72)))
    chosen = random_choice(6, 2, NUM_EXPERTS, 3)
    exact = exact_products(weights, x, chosen) + biases.double()[chosen]

    found = products(interpreted, x, table_of(interpreted, weights, list(biases)), chosen)

    assert (found.double() - exact).abs().max() <= ROUNDING[dtype] * exact.abs().max()


def test_experts_have_orders_and_zero_points_of_their_own(interpreted: dict[str, ModuleType]) -> None:
    """Each expert's columns are read in its own order, and experts without order or zero points stand beside others."""
    weights = weights_of("int4, small groups", 40, 160, sort=True)
    weights[1] = replace(weights[1], order=None)
    weights[2] = replace(weights[2], zeros=None)
    x, chosen = torch.randn(100, 160, generator=torch.Generator().manual_seed(5)), random_choice(100, 2, NUM_EXPERTS, 6)

    found = products(interpreted, x, table_of(interpreted, weights), chosen)

    exact = exact_products(weights, x, chosen)
    assert (found - exact).abs().max() <= 3 * ROUNDING[torch.float32] * exact.abs().max()


@pytest.mark.parametrize("form", ["mxfp4", "int4, small groups", "int8", "fp8 blocks"])
def test_neighbours_do_not_change_a_bit(interpreted: dict[str, ModuleType], form: str) -> None:
    """A token's rows have the same bits alone, among few and among many, where tiles are larger."""
    table = table_of(interpreted, weights_of(form, 40, 160))
    x, chosen = torch.randn(100, 160, generator=torch.Generator().manual_seed(6)), random_choice(100, 2, NUM_EXPERTS, 7)

    every = products(interpreted, x, table, chosen)

    for token in (0, 64, 99):
        alone = slice(token, token + 1)
        few = slice(max(token - 3, 0), token + 1)
        assert torch.equal(products(interpreted, x[alone], table, chosen[alone])[0], every[token])
        assert torch.equal(products(interpreted, x[few], table, chosen[few])[-1], every[token])


def test_padding_of_a_block_is_not_read(interpreted: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch) -> None:
    """Codes that end within a block give finite products wherever memory held NaN before."""
    weights = weights_of("int4, small groups", 24, 160, sort=True)
    x, empty = torch.randn(3, 160, generator=torch.Generator().manual_seed(6)), torch.empty
    table, chosen = table_of(interpreted, weights), random_choice(3, 2, NUM_EXPERTS, 1)

    def dirty(*shape: Any, **options: Any) -> torch.Tensor:
        made = empty(*shape, **options)
        return made.fill_(torch.nan) if made.is_floating_point() else made

    monkeypatch.setattr(torch, "empty", dirty)

    found = products(interpreted, x, table, chosen)

    exact = exact_products(weights, x, chosen)
    assert (found - exact).abs().max() <= 3 * ROUNDING[torch.float32] * exact.abs().max()


def float8_products(
    interpreted: dict[str, ModuleType], x: torch.Tensor, weights: Sequence[QuantizedWeight], chosen: torch.Tensor
) -> torch.Tensor:
    """The products of each choice where rows are rounded to float8 too."""
    linears = [QuantizedLinear([weight], None, x.dtype, StepKinds()) for weight in weights]
    for linear in linears:
        linear.take_kernels(interpreted["codes"].Float8Products)
    group = interpreted["products"].group_products(linears)
    rows = arranged(interpreted["launch"], chosen, NUM_EXPERTS, group.tile_rows)
    y = torch.full((rows.grid.num_rows, group.out_features), torch.nan, dtype=x.dtype)
    group.multiply(x[rows.tokens], y, rows)
    return y[rows.places]


@pytest.mark.parametrize("group", [64, 128, WHOLE_ROW])
def test_rows_in_float8_give_the_product_of_the_rounded_rows(interpreted: dict[str, ModuleType], group: int) -> None:
    """Rows that are rounded with scales of their own give their exact products, in tiles of 64 rows, with the bits that a token
    has alone."""
    weights = [random_weight(Codes.FLOAT8, 40, 160, group, seed=seed) for seed in range(NUM_EXPERTS)]
    x, chosen = torch.randn(70, 160, generator=torch.Generator().manual_seed(6)), random_choice(70, 2, NUM_EXPERTS, 7)

    found = float8_products(interpreted, x, weights, chosen)

    exact = exact_products(weights, rounded_rows(x), chosen)
    assert (found - exact).abs().max() <= 3 * ROUNDING[torch.float32] * exact.abs().max()
    assert torch.equal(float8_products(interpreted, x[69:], weights, chosen[69:])[0], found[69])


def layer_of(
    interpreted: dict[str, ModuleType], parts: Sequence[Sequence[QuantizedWeight]], downs: Sequence[QuantizedWeight]
) -> RoutedWeights:
    """A routed layer of experts with biases, whose codes kernels read. `parts` are gate and up of each expert."""
    generator, dtype = torch.Generator().manual_seed(8), torch.float32

    def linear(weights: Sequence[QuantizedWeight]) -> QuantizedLinear:
        bias = torch.randn(sum(weight.out_features for weight in weights), generator=generator)
        made = QuantizedLinear(weights, bias, dtype, StepKinds())
        made.take_kernels(interpreted["codes"].CodeProducts)
        return made

    experts = tuple(DenseWeights(linear(pair), linear([down])) for pair, down in zip(parts, downs, strict=True))
    return RoutedWeights(Linear(torch.ones(16, 64)), None, experts, None)


@pytest.mark.parametrize(("form", "sort"), [("mxfp4", False), ("int4, small groups", True), ("fp8", False)])
def test_a_layer_of_experts_computes_what_the_loop_computes(
    interpreted: dict[str, ModuleType], form: str, sort: bool
) -> None:
    """Grouped products and the loop give each token the same mixture, and tell the same rows to the host; gate and up with
    orders of their own are multiplied apart."""
    kind, group = FORMS[form]
    pairs = [
        [random_weight(kind, 96, 64, group, seed=2 * seed + part, sort=sort) for part in range(2)]
        for seed in range(NUM_EXPERTS)
    ]
    weights = layer_of(interpreted, pairs, [random_weight(kind, 64, 96, group, seed=9 + seed) for seed in range(3)])
    generator = torch.Generator().manual_seed(3)
    x, shares, chosen = torch.randn(9, 64, generator=generator), torch.rand(9, 2), random_choice(9, 2, NUM_EXPERTS, 9)
    found = []
    for backend in (ExpertLoop, interpreted["backend"].TritonExperts):
        rows = backend(weights).arrange(chosen, shares)
        inner = rows.multiply(x[rows.tokens], "experts_gate_up")[:, :96].contiguous()
        found.append((rows.combined(rows.multiply(inner, "experts_down")), rows.host))

    limit = 1e-5 * found[0][0].abs().max().item()
    torch.testing.assert_close(found[0][0], found[1][0], atol=limit, rtol=0)
    assert found[0][1].tokens.tolist() == found[1][1].tokens.tolist()
    assert found[0][1].experts.tolist() == found[1][1].experts.tolist()


def test_what_the_kernels_cannot_compute_is_named(interpreted: dict[str, ModuleType]) -> None:
    """Experts of which some are plain, have another form, or have no kernels in use, are left to the loop, which says why."""
    module, codes = interpreted["products"], interpreted["codes"]

    def linear(weight: QuantizedWeight, *, takes_kernels: bool = True) -> QuantizedLinear:
        made = QuantizedLinear([weight], None, torch.float32, StepKinds())
        if takes_kernels:
            made.take_kernels(codes.CodeProducts)
        return made

    int4, int8 = random_weight(Codes.INT4, 16, 64, 32), random_weight(Codes.INT8, 16, 64, 32)
    half = QuantizedLinear([int4, torch.ones(16, 64)], None, torch.float32, StepKinds())
    half.take_kernels(codes.CodeProducts)
    reasons: dict[str, list[AnyLinear]] = {
        "some of a layer's experts are quantised, and others are not": [linear(int4), Linear(torch.ones(16, 64))],
        "the kernels of quantised weights are not in use": [linear(int4, takes_kernels=False)],
        "the quantised weights of a layer's experts have different forms": [linear(int4), linear(int8)],
        "an expert is quantised in part": [half],
    }

    for reason, linears in reasons.items():
        with pytest.raises(ValueError, match=reason):
            module.group_products(linears)
    assert module.group_products([linear(int4), linear(int4)]).out_features == 16
    assert module.group_products([Linear(torch.ones(16, 64))]).out_features == 16


def test_what_does_not_fit_is_refused(interpreted: dict[str, ModuleType]) -> None:
    """Shapes, strides and forms that the kernels cannot read are errors, not wrong results."""
    launch, table = interpreted["code_launch"], table_of(interpreted, weights_of("int8", 8, 64))
    rows = arranged(interpreted["launch"], random_choice(4, 2, NUM_EXPERTS, 1), NUM_EXPERTS)

    with pytest.raises(ValueError, match="x has 4 rows, not 8"):
        next(launch.CodeExpertProduct(torch.ones(4, 64), table, torch.ones(4, 8), rows).launches())
    with pytest.raises(ValueError, match="do not fit a layer of 64 input and 8 output features"):
        next(launch.CodeExpertProduct(torch.ones(8, 32), table, torch.ones(8, 8), rows).launches())
    with pytest.raises(ValueError, match="experts have different forms"):
        table_of(interpreted, [*weights_of("int8", 8, 64), random_weight(Codes.INT8, 8, 128, WHOLE_ROW)])
    with pytest.raises(ValueError, match="biases of experts must be contiguous"):
        table_of(interpreted, weights_of("int8", 8, 64), list(torch.ones(3, 16)[:, ::2]))
