"""Rows and weights that are both float8_e4m3fn, under the interpreter: against torch's own rounding, and fp64."""

from types import ModuleType

import pytest
import torch

from graftwork.engine.quantization.weight import WHOLE_ROW, Codes
from tests.engine.quantization.test_products import random_weight

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")
LARGEST = 448.0


def rounded(launch: ModuleType, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The codes and scales of rows, in memory that held NaN before."""
    codes = torch.full(x.shape, torch.nan).to(torch.float8_e4m3fn)
    scales = torch.full((len(x),), torch.nan)
    launch.round_launch(x, codes, scales).run()
    return codes, scales


def product(launch: ModuleType, table: object, x: torch.Tensor, bias: torch.Tensor | None, width: int) -> torch.Tensor:
    y = torch.full((len(x), width), torch.nan, dtype=x.dtype)
    for one in launch.Float8Product(x, table, bias, y).launches():
        one.run()
    return y


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_rounded_as_torch_rounds(interpreted: dict[str, ModuleType], dtype: torch.dtype) -> None:
    """Rows of values of all sizes, of zeros and of tiny values get torch's codes, with the scales of vLLM."""
    generator = torch.Generator().manual_seed(1)
    sizes = torch.exp2(torch.randint(-14, 4, (6, 1300), generator=generator).float())
    x = (torch.randn(6, 1300, generator=generator) * sizes).to(dtype)
    x[3], x[4] = 0, x[4] * 2.0**-30

    codes, scales = rounded(interpreted["float8_launch"], x)

    expected = (x.float().abs().amax(dim=1) / LARGEST).clamp(min=1 / (LARGEST * 512))
    assert torch.equal(scales, expected)
    assert torch.equal(codes.float(), (x.float() / expected[:, None]).to(torch.float8_e4m3fn).float())
    assert int((codes.float().abs() == LARGEST).sum()) >= 4


def test_ties_and_subnormal_numbers_round_as_in_torch(interpreted: dict[str, ModuleType]) -> None:
    """Every number of float8 from 0 to 448, every middle between two neighbours, and what is beside a middle, is rounded as
    torch does, with either sign."""
    numbers = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middles = (numbers[1:] + numbers[:-1]) / 2
    beside = torch.cat([middles.nextafter(numbers[1:]), middles.nextafter(numbers[:-1])])
    x = torch.cat([numbers, middles, beside, -numbers, -middles, -beside])[None]

    codes, scales = rounded(interpreted["float8_launch"], x)

    assert scales.item() == 1.0
    assert torch.equal(codes.float(), x.to(torch.float8_e4m3fn).float())


@pytest.mark.parametrize("group", [32, 128, 256, WHOLE_ROW])
@pytest.mark.parametrize("width", [160, 1376])
def test_products_are_those_of_the_rounded_rows(interpreted: dict[str, ModuleType], group: int, width: int) -> None:
    """Products equal those of the rounded rows and the weight's values in fp64, whatever the scales and the spans."""
    launch, weight = interpreted["float8_launch"], random_weight(Codes.FLOAT8, 37, width, group)
    x, bias = (torch.randn(*shape, generator=torch.Generator().manual_seed(2)) for shape in ((3, width), (37,)))
    codes, scales = rounded(launch, x)
    exact = (codes.double() * scales.double()[:, None]) @ weight.dense(torch.float64).t() + bias.double()

    y = product(launch, interpreted["launch"].CodesTable.of_float8(weight), x, bias, 37)

    assert (y - exact).abs().max() <= 2e-6 * exact.abs().max()
    assert (y - (x.double() @ weight.dense(torch.float64).t() + bias)).abs().max() > 1e-3 * exact.abs().max()


def test_neighbours_do_not_change_a_bit(interpreted: dict[str, ModuleType]) -> None:
    """A row has the same bits alone, beside larger rows, and in another tile."""
    launch, weight = interpreted["float8_launch"], random_weight(Codes.FLOAT8, 40, 1024, WHOLE_ROW)
    table = interpreted["launch"].CodesTable.of_float8(weight)
    x = torch.randn(70, 1024, generator=torch.Generator().manual_seed(3))
    x[0] *= 1000

    alone, many = (product(launch, table, rows, None, 40) for rows in (x[66:67], x))

    assert torch.equal(many[66:67], alone)


def test_weights_in_words_are_refused(interpreted: dict[str, ModuleType]) -> None:
    """Codes that are in the order of the other kernels, and integers, are an error."""
    for weight in (random_weight(Codes.FLOAT8, 8, 64, 32).for_kernels, random_weight(Codes.INT8, 8, 64, 32)):
        with pytest.raises(ValueError, match="in their own order"):
            interpreted["launch"].CodesTable.of_float8(weight)
