"""The kernels of quantised weights under the interpreter: products against fp64, and bits that are a row's own."""

from types import ModuleType

import pytest
import torch

from graftwork.engine.kernels.launch import TRITON_DTYPES, Launch
from graftwork.engine.quantization.weight import WHOLE_ROW, Codes, QuantizedWeight
from tests.engine.quantization.test_products import random_weight

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")
ROUNDING = {torch.float32: 2e-6, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-6}
"""The largest error, of the largest value. The interpreter cuts bf16 off instead of rounding it."""


def product(
    launch: ModuleType, x: torch.Tensor, weight: QuantizedWeight, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """x @ W.T + bias, in memory that held NaN before, between columns that stay as they are."""
    wide = torch.full((len(x), weight.out_features + 2), torch.nan, dtype=x.dtype)
    y = wide[:, 1:-1]
    for one in launch.Product(x, launch.CodesTable.of(weight.for_kernels), bias, y).launches():
        one.run()
    assert wide[:, 0].isnan().all()
    assert wide[:, -1].isnan().all()
    return y


GROUPS = [(kind, group) for kind in Codes for group in (32, 64, 128, 256, WHOLE_ROW)]
"""Kinds of codes and sizes of groups. Powers of two are never one for a whole row."""
GROUPS = [one for one in GROUPS if one not in ((Codes.FLOAT4, 256), (Codes.FLOAT4, WHOLE_ROW))]


@pytest.mark.parametrize(("kind", "group"), GROUPS)
@pytest.mark.parametrize(("width", "rows"), [(160, 3), (1024, 17), (1376, 2)])
def test_products_are_those_of_the_values(
    interpreted: dict[str, ModuleType], kind: Codes, group: int, width: int, rows: int
) -> None:
    """The kernels' products equal those of the dense weight in fp64, whatever the group, the width and the spans."""
    weight = random_weight(kind, 37, width, group)
    x, bias = (torch.randn(*shape, generator=torch.Generator().manual_seed(1)) for shape in ((rows, width), (37,)))
    exact = x.double() @ weight.dense(torch.float64).t() + bias.double()

    y = product(interpreted["launch"], x, weight, bias)

    assert (y - exact).abs().max() <= ROUNDING[torch.float32] * exact.abs().max()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", Codes)
def test_products_in_16_bits_are_rounded_once(
    interpreted: dict[str, ModuleType], kind: Codes, dtype: torch.dtype
) -> None:
    """Rows and a bias in 16 bits give the product in fp64, rounded once: scales and zero points are not rounded."""
    weight, generator = random_weight(kind, 150, 288, 96 // 3, seed=3), torch.Generator().manual_seed(2)
    x, bias = (torch.randn(*shape, generator=generator).to(dtype) for shape in ((4, 288), (150,)))
    exact = x.double() @ weight.dense(torch.float64).t() + bias.double()

    y = product(interpreted["launch"], x, weight, bias)

    assert (y.double() - exact).abs().max() <= ROUNDING[dtype] * exact.abs().max()


def bits_of(code_kernel: ModuleType, words: torch.Tensor, step: int, kind: Codes, dtype: torch.dtype) -> torch.Tensor:
    """What the kernels make of one step of words, as numbers of `dtype`, before bias or exponent are corrected."""
    bits = torch.empty(len(words), dtype=torch.int32 if dtype == torch.float32 else torch.int16)
    Launch(
        code_kernel.write_bits_kernel,
        (1,),
        {"words": words, "bits": bits, "STEP": step, "KIND": kind.value, "DTYPE": TRITON_DTYPES[dtype], "SIZE": 256},
        {},
    ).run()
    return bits.view(dtype)


def random_words() -> torch.Tensor:
    generator = torch.Generator().manual_seed(8)
    return torch.randint(-(2**31), 2**31, (256,), generator=generator, dtype=torch.int64).to(torch.int32)


@pytest.mark.parametrize("dtype", ROUNDING)
def test_every_float8_is_exact(interpreted: dict[str, ModuleType], dtype: torch.dtype) -> None:
    """In every dtype, and beside any other bytes of a word, all numbers of float8_e4m3fn but the two NaN become themselves,
    subnormal ones too, when torch corrects the exponent."""
    codes, power = torch.arange(256, dtype=torch.uint8), 2.0 ** (8 if dtype == torch.float16 else 120)
    are_numbers = (codes & 0x7F) != 0x7F

    for step in range(4):
        words = random_words().view(torch.uint8).view(256, 4).clone()
        words[:, step] = codes  # the lowest byte comes first
        found = bits_of(interpreted["code_kernel"], words.view(torch.int32)[:, 0], step, Codes.FLOAT8, dtype) * power

        expected = codes.view(torch.float8_e4m3fn).to(dtype)
        assert torch.equal(found[are_numbers], expected[are_numbers])


@pytest.mark.parametrize("dtype", ROUNDING)
def test_every_integer_of_four_bits_is_exact(interpreted: dict[str, ModuleType], dtype: torch.dtype) -> None:
    """In every dtype each nibble of a word becomes its number from -8 to 7, when torch takes off the bias."""
    words, bias = random_words(), {torch.float32: 2**23 + 8, torch.float16: 1032, torch.bfloat16: 136}[dtype]

    for step in range(8):
        found = bits_of(interpreted["code_kernel"], words, step, Codes.INT4, dtype) - bias

        nibbles = (words.long() >> (4 * step)) % 16
        assert torch.equal(found, torch.where(nibbles < 8, nibbles, nibbles - 16).to(dtype))
        assert len(set(found.tolist())) == 16


@pytest.mark.parametrize("dtype", ROUNDING)
def test_every_float4_is_exact(interpreted: dict[str, ModuleType], dtype: torch.dtype) -> None:
    """In every dtype each nibble of a word becomes the number of float4_e2m1 that the OCP's table gives it, when torch corrects
    the exponent."""
    words, power = random_words(), 2.0 ** (14 if dtype == torch.float16 else 126)
    table = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    table = torch.cat([table, -table]).to(dtype)

    for step in range(8):
        found = bits_of(interpreted["code_kernel"], words, step, Codes.FLOAT4, dtype).float() * power

        expected = table[(words.long() >> (4 * step)) % 16]
        assert torch.equal(found.to(dtype), expected)
        assert len(set(found.tolist())) == 15  # both zeros are one


def test_every_power_of_two_is_exact(interpreted: dict[str, ModuleType]) -> None:
    """Each exponent of a group becomes the scale that a dense weight has, from 2 ** -127 to infinity."""
    exponents, scales = torch.arange(256, dtype=torch.uint8), torch.empty(256)

    Launch(
        interpreted["code_kernel"].write_scales_kernel,
        (1,),
        {"stored": exponents, "scales": scales, "KIND": Codes.FLOAT4.value, "SIZE": 256},
        {},
    ).run()

    expected = [2.0 ** (exponent - 127) for exponent in range(255)]
    assert scales[:255].tolist() == expected
    assert scales[255] == torch.inf
    weight = QuantizedWeight.of_mxfp4(torch.full((255, 1, 16), 2, dtype=torch.uint8), exponents[:255, None])
    assert weight.dense(torch.float32)[:, 0].tolist() == expected


@pytest.mark.parametrize("kind", Codes)
def test_neighbours_do_not_change_a_bit(interpreted: dict[str, ModuleType], kind: Codes) -> None:
    """A row has the same bits alone, among few, and among so many that its tile is larger."""
    launch, weight = interpreted["launch"], random_weight(kind, 40, 1376, 64)
    x = torch.randn(20, 1376, generator=torch.Generator().manual_seed(4))

    alone, few, many = (product(launch, rows, weight) for rows in (x[5:6], x[3:8], x))

    assert torch.equal(few[2], alone[0])
    assert torch.equal(many[3:8], few)


@pytest.mark.parametrize("group", [128, WHOLE_ROW])
def test_one_program_adds_spans_as_several_do(interpreted: dict[str, ModuleType], group: int) -> None:
    """A row has the same bits where a program has one span, as with few rows, and where it has all."""
    launch, weight = interpreted["launch"], random_weight(Codes.INT8, 2050, 1024, group)
    x, y = torch.randn(33, 1024, generator=torch.Generator().manual_seed(5)), torch.empty(33, 2050)
    table = launch.CodesTable.of(weight.for_kernels)
    few, many = (
        [one.kernel.__name__ for one in launch.Product(x[:rows], table, None, y[:rows]).launches()] for rows in (1, 33)
    )

    assert "add_spans_kernel" in few
    assert "add_spans_kernel" not in many
    assert torch.equal(product(launch, x, weight)[:1], product(launch, x[:1], weight))


def test_padding_of_a_block_is_not_read(interpreted: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights that end within a block, with zero points, give finite products wherever memory held NaN before."""
    launch, weight = interpreted["launch"], random_weight(Codes.INT4, 8, 160, 32)
    x, empty = torch.randn(3, 160, generator=torch.Generator().manual_seed(6)), torch.empty
    monkeypatch.setattr(torch, "empty", lambda *shape, **options: empty(*shape, **options).fill_(torch.nan))

    y = product(launch, x, weight)

    exact = x.double() @ weight.dense(torch.float64).t()
    assert (y - exact).abs().max() <= ROUNDING[torch.float32] * exact.abs().max()


def test_what_does_not_fit_is_refused(interpreted: dict[str, ModuleType]) -> None:
    """Shapes, strides and layouts that the kernels cannot read are errors, not wrong results."""
    launch, weight = interpreted["launch"], random_weight(Codes.FLOAT8, 8, 64, 32)
    table = launch.CodesTable.of(weight.for_kernels)

    with pytest.raises(ValueError, match="do not fit a layer of 64 input and 8 output features"):
        next(launch.Product(torch.ones(2, 32), table, None, torch.ones(2, 8)).launches())
    with pytest.raises(ValueError, match="adjacent in memory"):
        next(launch.Product(torch.ones(64, 2).t(), table, None, torch.ones(2, 8)).launches())
    with pytest.raises(ValueError, match="another layout"):
        launch.CodesTable.of(weight)
