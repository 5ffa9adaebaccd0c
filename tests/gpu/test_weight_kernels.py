"""The kernels of quantised weights on a GPU: the sizes of real models, equal bits, and CUDA graphs."""

import pytest
import torch

from graftwork.engine.quantization.weight import WHOLE_ROW, Codes, QuantizedWeight

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

DEVICE = torch.device("cuda")
SIZES = {"llama-8b qkv": (6144, 4096), "llama-8b gate_up": (28_672, 4096), "qwen2-0.5b down": (896, 4864)}
"""Output and input features."""
FORMS = {
    "int8": (Codes.INT8, WHOLE_ROW, False),
    "int8 zeros": (Codes.INT8, WHOLE_ROW, True),
    "int4": (Codes.INT4, 128, False),
    "int4 zeros, small groups": (Codes.INT4, 32, True),
    "fp8": (Codes.FLOAT8, WHOLE_ROW, False),
    "fp8 blocks": (Codes.FLOAT8, 128, False),
}
ROUNDING = {torch.float32: 1e-5, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}
FLOAT8_CAPABILITY = (8, 9)


def random_weight(form: str, out_features: int, in_features: int) -> QuantizedWeight:
    kind, group, has_zeros = FORMS[form]
    generator = torch.Generator(DEVICE).manual_seed(1)
    groups, most = (1 if group == WHOLE_ROW else in_features // group), 8 if kind is Codes.INT4 else 127
    scales = 0.5 + torch.rand(out_features, groups, generator=generator, device=DEVICE)
    shape = (out_features, in_features)
    if kind is Codes.FLOAT8:
        codes = torch.randn(shape, generator=generator, device=DEVICE).to(torch.float8_e4m3fn)
        return QuantizedWeight.of(codes, scales, kind=kind, group_size=group)
    codes = torch.randint(-most, most, shape, generator=generator, device=DEVICE).to(torch.int8)
    zeros = torch.randint(-most, most, (out_features, groups), generator=generator, device=DEVICE)
    return QuantizedWeight.of(codes, scales, zeros if has_zeros else None, kind=kind, group_size=group)


def check(form: str, size: str, dtype: torch.dtype, *, rounds_rows: bool = False) -> None:
    """Steps of all sizes equal fp64, rounded once, and a row's bits do not depend on the step."""
    pytest.importorskip("triton", reason="the kernels extra is not installed")
    from graftwork.engine.quantization.triton.products import products_of
    from graftwork.engine.quantization.triton.selftest import rounded_rows

    out_features, in_features = SIZES[size]
    weight = random_weight(form, out_features, in_features)
    products = products_of(rounds_rows=rounds_rows)(weight)
    generator = torch.Generator(DEVICE).manual_seed(2)
    x = torch.randn(2048, in_features, generator=generator, device=DEVICE).to(dtype)
    bias = torch.randn(out_features, generator=generator, device=DEVICE).to(dtype)

    def multiply(rows: int) -> torch.Tensor:
        y = torch.full((rows, out_features), torch.nan, dtype=dtype, device=DEVICE)
        products.multiply(x[:rows], bias, y)
        return y

    by_rows = {rows: multiply(rows) for rows in (1, 5, 16, 17, 32, 64, 100, 512, 2048)}

    for rows, found in by_rows.items():
        assert torch.equal(found, by_rows[2048][:rows]), rows
    first = rounded_rows(x[:4]) if rounds_rows else x[:4]
    exact = first.double() @ weight.dense(torch.float32).double().t() + bias.double()
    assert (by_rows[2048][:4].double() - exact).abs().max() <= ROUNDING[dtype] * exact.abs().max()


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("form", FORMS)
def test_products_are_exact_with_the_same_bits_in_every_step(form: str, size: str, dtype: torch.dtype) -> None:
    """Decoding rows and prompts of a real layer equal fp64, rounded once, with the bits that a row has alone."""
    check(form, size, dtype)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("form", ["fp8", "fp8 blocks"])
def test_rows_in_float8_keep_their_bits_too(form: str, size: str) -> None:
    """Rows that are rounded to float8 give the product of the rounded rows, with the same bits in every step."""
    if torch.cuda.get_device_capability() < FLOAT8_CAPABILITY:
        pytest.skip("needs matrix units for float8")
    check(form, size, torch.bfloat16, rounds_rows=True)


@pytest.mark.parametrize("form", FORMS)
def test_a_graph_multiplies_other_rows(form: str) -> None:
    """A captured product serves rows that it has never seen."""
    pytest.importorskip("triton", reason="the kernels extra is not installed")
    from graftwork.engine.quantization.triton.products import CodeProducts

    products = CodeProducts(random_weight(form, 512, 1024))
    x, y = (torch.zeros(16, width, dtype=torch.bfloat16, device=DEVICE) for width in (1024, 512))
    products.multiply(x, None, y)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        products.multiply(x, None, y)

    x.copy_(torch.randn(16, 1024, generator=torch.Generator(DEVICE).manual_seed(3), device=DEVICE))
    graph.replay()
    expected = torch.full_like(y, torch.nan)
    products.multiply(x, None, expected)

    assert torch.equal(y, expected)
    assert bool(y.any())
