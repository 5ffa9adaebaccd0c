"""Tests of the attention kernels on a GPU: against fp64, the bits of rows, and steps of a fixed capacity."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from graftwork.engine.core.sampling import RollingWindow
from tests.engine.attention.cases import Step, TextRotation, random_step, run_kernels
from tests.engine.attention.test_kernels import SLICES, shape_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
LONG = ((4095, 1, 0), (2000, 5, 4), (0, 300, 0), (1000, 200, 3), (0, 1, 0))


@pytest.fixture(autouse=True)
def _needs_triton() -> None:
    pytest.importorskip("triton", reason="the kernels extra is not installed")


def mixed(
    step: Step, num_programs: int = 528, rotation: TextRotation | None = None, **rules: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the kernels make of a step on the device, and what fp64 makes of it."""
    from graftwork.engine.attention import launch, reference
    from graftwork.engine.kernels.angles import Rotation

    chosen = launch.ScoreRules(step.shape.head_dim**-0.5, **rules)
    on_device = launch.ScoreRules(**{**_fields(chosen), "sinks": _cuda(chosen.sinks)})
    actual = run_kernels(launch, step, on_device, num_programs, torch.device("cuda"), rotation).cpu()
    turn = None if rotation is None else Rotation(rotation.frequencies, rotation.is_interleaved)
    return actual, reference.attend(step.query, *step.numbers, step.batch, chosen, turn)


def _fields(rules: Any) -> dict[str, Any]:
    return {name: getattr(rules, name) for name in rules.__slots__}


def _cuda(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.cuda()


def assert_near(step: Step, **rules: Any) -> None:
    actual, expected = mixed(step, **rules)
    largest = max(float(expected.abs().max()), 1.0)
    assert float((actual.double() - expected).abs().max()) < TOLERANCE[step.shape.dtype] * largest


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(32, 8, 128), (14, 2, 64), (32, 32, 80), (16, 8, 256)])
@pytest.mark.parametrize("slices", [SLICES, LONG])
def test_kernels_are_near_fp64(
    dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int, slices: Sequence[tuple[int, int, int]]
) -> None:
    """Decoding rows, drafts and chunks of common models are within rounding of fp64."""
    assert_near(random_step(shape_of(heads, kv_heads, head_dim, dtype=dtype), slices, num_padding=2))


@pytest.mark.parametrize("window", [1, 17, 300, 4096])
def test_windows_caps_and_sinks_are_near_fp64(window: int) -> None:
    """Windows with soft caps and sinks are within rounding of fp64."""
    step = random_step(shape_of(8, 2, 64, dtype=torch.bfloat16), LONG)

    assert_near(step, window=window)
    assert_near(step, window=window, cap=20.0, sinks=torch.linspace(-3, 3, 8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kv_dtype", [torch.int8, torch.float8_e4m3fn])
def test_codes_with_scales_are_near_fp64(dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    """Pages of int8 and fp8 with a scale for each head of a token are within rounding of fp64."""
    if kv_dtype == torch.float8_e4m3fn and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this device does not convert e4m3")
    step = random_step(shape_of(32, 8, 128, dtype=dtype, kv_dtype=kv_dtype), LONG)

    assert_near(step)
    assert_near(step, window=300, cap=20.0)


@pytest.mark.parametrize(
    ("dtype", "kv_dtype"), [(torch.bfloat16, None), (torch.float32, None), (torch.bfloat16, torch.int8)]
)
@pytest.mark.parametrize("window", [None, 300])
def test_the_bits_of_a_row_are_its_own(dtype: torch.dtype, kv_dtype: torch.dtype | None, window: int | None) -> None:
    """Drafts have the bits of lone rows, neighbours change none, and a prompt may be cut anywhere."""
    from tests.engine.attention.test_row_bits import step_of, whole_request

    drafts, prompt = (whole_request(*rows, dtype, kv_dtype=kv_dtype) for rows in ((600, 10), (0, 80)))

    together, _ = mixed(step_of(drafts, (0, 10, 9, 7)), window=window)
    alone = [mixed(step_of(drafts, (row, 1, 0, 0)), window=window, num_programs=3)[0] for row in range(10)]
    at_once, _ = mixed(step_of(prompt, (0, 80, 0, 0)), window=window)
    cuts = [mixed(step_of(prompt, (*cut, 0, 0)), window=window)[0] for cut in ((0, 2), (2, 31), (33, 47))]

    assert torch.equal(together[7:], torch.cat(alone))
    assert torch.equal(at_once, torch.cat(cuts))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(32, 8, 128), (14, 2, 64)])
@pytest.mark.parametrize("window", [RollingWindow(4, 300), RollingWindow(0, 17), RollingWindow(300, 1500)])
def test_rolling_windows_are_near_fp64(
    dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int, window: RollingWindow
) -> None:
    """Requests with a rolling window, which have given up all pages between, beside one without are within rounding of fp64, and
    that one has the bits that it has without them."""
    shape, windows = shape_of(heads, kv_heads, head_dim, dtype=dtype), [window, window, window, None, window]
    step = random_step(shape, LONG, windows=windows)
    rotation = TextRotation(1 / 10_000.0 ** (torch.arange(head_dim // 2) / (head_dim // 2)))
    rows = slice(306, 506)  # of the fourth request
    lone = replace(step, pieces=step.pieces[3:4], query=step.query[rows])

    actual, expected = mixed(step, rotation=rotation)

    assert float((actual.double() - expected).abs().max()) < TOLERANCE[dtype]
    assert torch.equal(actual[rows], mixed(lone)[0])


def test_two_runs_have_the_same_bits() -> None:
    """A step that is run again has the same bits."""
    step = random_step(shape_of(32, 8, 128, dtype=torch.bfloat16), LONG)

    assert torch.equal(mixed(step)[0], mixed(step)[0])
