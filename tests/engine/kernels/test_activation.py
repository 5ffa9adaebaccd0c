"""Tests of the gated activation, under the interpreter."""

from types import ModuleType

import pytest
import torch
from transformers.activations import ACT2FN

from tests.engine.kernels.test_norm import strided

NAMES = {"silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh"}
TOLERANCE = {torch.float32: 5e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}


@pytest.mark.parametrize("width", [1, 24, 1024, 1100])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", NAMES)
def test_activations_are_those_of_transformers(
    interpreted: dict[str, ModuleType], generator: torch.Generator, name: str, dtype: torch.dtype, width: int
) -> None:
    """Rows with any stride are activated as by transformers' function, and multiplied by `up`."""
    gate_up = strided(3, 2 * width, dtype, generator)
    inner = torch.full((3, width), float("nan"), dtype=dtype)
    gate, up = gate_up.chunk(2, dim=1)
    expected = ACT2FN[NAMES[name]](gate) * up

    interpreted["activation"].activate_launch(gate_up, inner, name).run()

    torch.testing.assert_close(inner, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("name", NAMES)
def test_an_activation_is_rounded_before_it_is_multiplied(
    interpreted: dict[str, ModuleType], generator: torch.Generator, name: str
) -> None:
    """For gates above zero less than 1 fp16 value of 100 differs from torch's. Below zero GELU's own sum cancels, and
    fp32 bits are lost in torch too."""
    gate_up = strided(8, 1024, torch.float16, generator)
    inner = torch.empty(8, 512, dtype=torch.float16)
    gate, up = gate_up.chunk(2, dim=1)
    gate.abs_()
    expected = ACT2FN[NAMES[name]](gate.float()).half() * up

    interpreted["activation"].activate_launch(gate_up, inner, name).run()

    assert (inner != expected).float().mean() < 0.01


@pytest.mark.parametrize("name", NAMES)
def test_far_from_zero_an_activation_is_its_limit(interpreted: dict[str, ModuleType], name: str) -> None:
    """A large gate passes itself and a large negative one gives zero: nothing overflows to NaN."""
    gate_up = torch.tensor([[200.0, -200.0, 3e38, -3e38, 1.0, 1.0, 1.0, 1.0]])
    if name == "gelu_tanh":
        gate_up[0, 2:4] = torch.tensor([1e12, -1e12])  # its cube must stay finite, as in torch
    inner = torch.empty(1, 4)

    interpreted["activation"].activate_launch(gate_up, inner, name).run()

    assert torch.equal(inner, gate_up[:, :4].clamp(min=0))


def test_a_gap_between_columns_is_refused(interpreted: dict[str, ModuleType]) -> None:
    """A result that is a view with gaps is refused before the launch."""
    with pytest.raises(ValueError, match="adjacent"):
        interpreted["activation"].activate_launch(torch.ones(2, 8), torch.empty(2, 8)[:, :4], "silu")
