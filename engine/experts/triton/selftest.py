"""Tests the kernels of routed layers on a device at the engine's start, before any request uses them.

The tests arrange two small steps, one for each size of tiles, and compare their products with plain torch. That of codes also
checks that a row has the same bits in both.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace

import torch

from graftwork.engine.experts.triton.launch import (
    ExpertTable,
    TiledRows,
    TileGrid,
    arrange_launches,
    empty_rows,
    multiply_launch,
)
from graftwork.engine.experts.triton.products import group_products
from graftwork.engine.quantization.linear import QuantizedLinear, StepKinds
from graftwork.engine.quantization.triton.products import products_of
from graftwork.engine.quantization.triton.selftest import FLOAT8_TOLERANCE, rounded_rows, trial_weight
from graftwork.engine.quantization.weight import QuantizedWeight

_SEED = 20262
_NUM_EXPERTS, _IN_FEATURES, _OUT_FEATURES = 3, 136, 72
_CODE_FEATURES = 288
"""Input features of experts with codes: more than two blocks, and no whole number of them."""
_TOKENS = (7, 200)
"""Tokens of the two steps. The second has so many rows that tiles are large."""
_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
"""The largest error, relative to the largest value: one rounding, and a margin for another order of the sums."""


def why_expert_kernels_fail(device: torch.device, dtype: torch.dtype) -> str | None:
    """Returns what is wrong with the kernels on a device, as a text for the log; None if they compute what torch does."""
    return _found(device, lambda: _failure(device, dtype))


def why_code_experts_fail(
    form: QuantizedWeight, device: torch.device, dtype: torch.dtype, *, rounds_rows: bool = False
) -> str | None:
    """Returns what is wrong with the kernels for experts whose codes have the form of `form`; None if they compute what torch
    does. With `rounds_rows`, products with FLOAT8 round the rows too.
    """
    return _found(device, lambda: _code_failure(form, device, dtype, rounds_rows=rounds_rows))


def _found(device: torch.device, trial: Callable[[], str | None]) -> str | None:
    try:
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            return trial()
    except Exception as error:  # noqa: BLE001 - compilers, drivers and linkers each fail in a way of their own
        first_line = next(iter(str(error).strip().splitlines()), "no message")
        return f"{type(error).__name__}: {first_line}"


def _failure(device: torch.device, dtype: torch.dtype) -> str | None:
    errors = {num_tokens: _error(device, dtype, num_tokens) for num_tokens in _TOKENS}
    wrong = [f"{error:.3g} for {tokens} tokens" for tokens, error in errors.items() if not error <= _TOLERANCE[dtype]]
    return f"results differ from plain torch by {', '.join(wrong)}, of the largest" if wrong else None


def _choice(num_tokens: int, generator: torch.Generator) -> torch.Tensor:
    """Returns two experts for each token: int64 [num_tokens, 2]."""
    return torch.rand(num_tokens, _NUM_EXPERTS, generator=generator).topk(2, dim=1).indices


def _arranged(chosen: torch.Tensor, device: torch.device, tile_rows: int | None = None) -> TiledRows:
    rows = empty_rows(TileGrid.of(chosen, _NUM_EXPERTS, tile_rows), device)
    for launch in arrange_launches(chosen.to(device), rows):
        launch.run()
    return rows


def _error(device: torch.device, dtype: torch.dtype, num_tokens: int) -> float:
    """Returns the largest error of a step, relative to the largest value of the reference."""
    generator = torch.Generator().manual_seed(_SEED)
    x = torch.randn(num_tokens, _IN_FEATURES, generator=generator).to(dtype)
    weights = torch.randn(_NUM_EXPERTS, _OUT_FEATURES, _IN_FEATURES, generator=generator).to(dtype)
    biases = torch.randn(_NUM_EXPERTS, _OUT_FEATURES, generator=generator).to(dtype)
    chosen = _choice(num_tokens, generator)
    expected = torch.einsum("tcoi,ti->tco", weights.float()[chosen], x.float()) + biases.float()[chosen]

    on_device = [tensor.to(device) for tensor in (*weights, *biases)]
    table = ExpertTable.of(on_device[:_NUM_EXPERTS], on_device[_NUM_EXPERTS:])
    rows = _arranged(chosen, device)
    y = torch.empty(rows.grid.num_rows, _OUT_FEATURES, dtype=dtype, device=device)
    multiply_launch(x.to(device).index_select(0, rows.tokens), y, table, rows).run()
    found = y.cpu().float()[rows.places.cpu()]  # [num_tokens, num_chosen, out_features]
    return ((found - expected).abs().max() / expected.abs().max()).item()


def _code_failure(form: QuantizedWeight, device: torch.device, dtype: torch.dtype, *, rounds_rows: bool) -> str | None:
    generator = torch.Generator().manual_seed(_SEED)
    weights = [trial_weight(form, (_OUT_FEATURES, _CODE_FEATURES), generator) for _ in range(_NUM_EXPERTS)]
    if form.order is not None:
        weights = [replace(one, order=torch.randperm(_CODE_FEATURES, generator=generator)) for one in weights]
    linears = [QuantizedLinear([weight.to(device)], None, dtype, StepKinds()) for weight in weights]
    for linear in linears:
        linear.take_kernels(products_of(rounds_rows=rounds_rows))
    products = group_products(linears)
    few, many = _TOKENS
    x, chosen = torch.randn(many, _CODE_FEATURES, generator=generator).to(dtype), _choice(many, generator)

    def multiply(num_tokens: int) -> torch.Tensor:
        """Returns the products of the first tokens: [num_tokens, num_chosen, out_features]."""
        rows = _arranged(chosen[:num_tokens], device, products.tile_rows)
        y = torch.empty(rows.grid.num_rows, _OUT_FEATURES, dtype=dtype, device=device)
        products.multiply(x.to(device).index_select(0, rows.tokens), y, rows)
        return y.cpu()[rows.places.cpu()]

    first, tolerance = x[:few], _TOLERANCE[dtype]
    if products.tile_rows is not None:
        first, tolerance = rounded_rows(first), max(tolerance, FLOAT8_TOLERANCE)
    dense = torch.stack([replace(one, scale_dtype=torch.float64).dense(torch.float64) for one in weights])
    exact = torch.einsum("tcoi,ti->tco", dense[chosen[:few]], first.double())
    found = multiply(few)
    error = ((found.double() - exact).abs().max() / exact.abs().max()).item()
    if not error <= tolerance:
        return f"products of {form.kind.value} differ from plain torch by {error:.3g} of the largest"
    if not torch.equal(multiply(many)[:few], found):
        return f"a row's product with {form.kind.value} depends on its neighbours"
    return None
