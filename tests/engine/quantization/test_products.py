"""The compiled kernel's products are those of the values, and a row's bits are its own."""

from collections.abc import Callable

import pytest
import torch

from graftwork.engine.quantization.cpu_products import CpuProducts
from graftwork.engine.quantization.cpu_selftest import why_kernel_fails
from graftwork.engine.quantization.linear import LinearWeight, QuantizedLinear, StepKinds
from graftwork.engine.quantization.weight import WHOLE_ROW, Codes, QuantizedWeight

FEATURES = (64, 160, 1024, 1376)
ON_A_CPU = (Codes.INT4, Codes.INT8, Codes.FLOAT8)
"""The codes that the CPU's kernel reads."""


def random_weight(
    kind: Codes, out: int, width: int, group: int, *, seed: int = 0, sort: bool = False
) -> QuantizedWeight:
    """A random weight with zero points, if its codes are integers, and columns out of order, if `sort`."""
    generator = torch.Generator().manual_seed(seed)
    groups = 1 if group == WHOLE_ROW else -(-width // group)
    if kind is Codes.FLOAT4:
        codes = torch.randint(0, 16, (out, width), generator=generator).to(torch.uint8)
        powers = torch.randint(124, 130, (out, groups), generator=generator).to(torch.uint8)
        return QuantizedWeight.of(codes, powers, kind=kind, group_size=group)
    scales = (0.5 + torch.rand(out, groups, generator=generator)).to(torch.float32)
    order = torch.randperm(width, generator=generator) if sort else None
    if kind is Codes.FLOAT8:
        codes = torch.randn(out, width, generator=generator).to(torch.float8_e4m3fn)
        return QuantizedWeight.of(codes, scales, kind=kind, group_size=group, order=order)
    most = 8 if kind is Codes.INT4 else 128
    codes = torch.randint(-most, most, (out, width), generator=generator).to(torch.int8)
    zeros = torch.randint(-most, most + 1, (out, groups), generator=generator)
    return QuantizedWeight.of(codes, scales, zeros, kind=kind, group_size=group, order=order)


@pytest.mark.parametrize("kind", ON_A_CPU)
@pytest.mark.parametrize("group", [32, 64, 128, 256, WHOLE_ROW])
@pytest.mark.parametrize("width", FEATURES)
def test_products_are_those_of_the_values(kind: Codes, group: int, width: int) -> None:
    """The kernel's products equal those of the dense weight in fp64, whatever the group and the width."""
    weight = random_weight(kind, 37, width, group, sort=group == 32)
    x = torch.randn(5, width, generator=torch.Generator().manual_seed(1))
    exact = x.double() @ weight.dense(torch.float64).t()

    y = CpuProducts(weight).multiply(x)

    assert (y - exact).abs().max() <= 3e-6 * exact.abs().max()


@pytest.mark.parametrize("kind", ON_A_CPU)
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 8, 17, 64])
def test_the_bits_of_a_row_do_not_follow_from_its_neighbours(kind: Codes, rows: int) -> None:
    """A row has the same product in every batch and at every place in it."""
    products = CpuProducts(random_weight(kind, 300, 1376, 64))
    x = torch.randn(64, 1376, generator=torch.Generator().manual_seed(2))
    alone = torch.cat([products.multiply(x[row : row + 1]) for row in range(64)])

    assert torch.equal(products.multiply(x[:rows]), alone[:rows])
    assert torch.equal(products.multiply(x[-rows:].flip(0)).flip(0), alone[-rows:])


@pytest.mark.parametrize("threads", [2, 3])
def test_threads_do_not_change_a_bit(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs that several threads compute have the bits that one thread gives them."""
    products = CpuProducts(random_weight(Codes.INT4, 1000, 256, 32))
    x = torch.randn(6, 256, generator=torch.Generator().manual_seed(3))
    alone = products.multiply(x)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)

    assert torch.equal(products.multiply(x), alone)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_prompt_rows_and_decoding_rows_keep_their_bits(dtype: torch.dtype) -> None:
    """In a layer of three parts, a row's bits follow from its kind, not from the prompts and rows beside it."""
    parts: list[LinearWeight] = [
        random_weight(kind, out, 160, 32, seed=out) for kind, out in zip(ON_A_CPU, (64, 8, 40), strict=True)
    ]
    parts.append(torch.randn(24, 160, generator=torch.Generator().manual_seed(4)).to(dtype))
    kinds, bias = StepKinds(), torch.randn(136).to(dtype)
    layer = QuantizedLinear(parts, bias, dtype, kinds)
    x = torch.randn(40, 160, generator=torch.Generator().manual_seed(5)).to(dtype)

    def run(rows: torch.Tensor, *prompts: range) -> torch.Tensor:
        kinds.prompt_rows = prompts
        return layer(rows)

    decoding = torch.cat([run(x[row : row + 1]) for row in range(40)])
    prompt = torch.cat([run(x[start : start + 2], range(2)) for start in range(0, 40, 2)])
    mixed = run(x, range(3, 9), range(9, 20), range(38, 40))

    assert torch.equal(mixed[:3], decoding[:3])
    assert torch.equal(mixed[3:20], prompt[3:20])
    assert torch.equal(mixed[20:38], decoding[20:38])
    assert torch.equal(mixed[38:], prompt[38:])
    exact = x.double() @ layer.weight.double().t() + bias.double()
    close = 2e-6 if dtype == torch.float32 else 8e-3
    assert (decoding - exact).abs().max() <= close * exact.abs().max()
    assert (prompt - exact).abs().max() <= close * exact.abs().max()


@pytest.mark.parametrize("kind", ON_A_CPU)
def test_the_kernel_passes_its_own_test(kind: Codes) -> None:
    """The kernel works on this machine for every kind of codes."""
    assert why_kernel_fails(kind) is None


def test_a_kernel_that_fails_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the kernel fails its test, torch computes all rows, and the result is near the kernel's."""
    weight = random_weight(Codes.INT8, 64, 160, 32)
    x = torch.randn(3, 160, generator=torch.Generator().manual_seed(6))
    usual = QuantizedLinear([weight], None, torch.float32, StepKinds())(x)
    broken: Callable[[Codes], str | None] = lambda kind: "it is broken"
    monkeypatch.setattr("graftwork.engine.quantization.cpu_selftest.why_kernel_fails", broken)
    layer = QuantizedLinear([weight], None, torch.float32, StepKinds())

    assert layer.num_bytes == weight.num_bytes
    assert torch.allclose(layer(x), usual, rtol=1e-5, atol=1e-4 * float(usual.abs().max()))
