"""Tests of the row operations by interpreted kernels, against those in torch."""

from dataclasses import replace
from types import ModuleType

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from graftwork.engine.model.block import NormKind
from graftwork.engine.model.config import ModelConfig
from graftwork.engine.model.rope_config import Llama3Scaling, LongScaling, RopeConfig, YarnScaling
from graftwork.engine.runner.input_batch import BatchTensors
from graftwork.engine.runner.row_ops import TorchRowOps, rms_norm_rounded_once
from tests.engine.runner.row_sides import MODEL, NUM_FRAMES, PAGE_TOKENS, Side, batch_of, side

pytestmark = [
    # Triton 3.6's interpreter makes loop bounds of one-element arrays.
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),
]

ROPES = {
    "plain": RopeConfig(10_000.0, None, 1.0),
    "llama3": RopeConfig(500_000.0, Llama3Scaling(8.0, 1.0, 4.0, 16), 1.0),
    "yarn": RopeConfig(10_000.0, YarnScaling(4.0, 32.0, 1.0, True, 16), 0.6),
}
LONG = LongScaling((1.0, 1.5, 2.0), (2.0, 3.0, 5.0), 32)
FORMS = {
    "interleaved": RopeConfig(10_000.0, is_interleaved=True),
    "interleaved in part": RopeConfig(10_000.0, share=0.5, is_interleaved=True),
    "in part": RopeConfig(10_000.0, LONG, 1.2, share=0.5),
    "none": None,
}
TOLERANCE = {torch.float32: 2e-6, torch.float16: 4e-3, torch.bfloat16: 4e-2}


def both(
    interpreted: dict[str, ModuleType], model: ModelConfig, dtype: torch.dtype = torch.float32, kv_dtype: str = "auto"
) -> tuple[Side, Side]:
    """The kernels and torch."""
    kernels = interpreted["graftwork.engine.runner.triton_row_ops"].TritonRowOps
    return side(kernels, model, dtype, kv_dtype=kv_dtype), side(TorchRowOps, model, dtype, kv_dtype=kv_dtype)


def qkv_of(batch: BatchTensors, model: ModelConfig, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    width = (model.num_heads + 2 * model.num_kv_heads) * model.head_dim
    whole = torch.randn(len(batch.token_ids), width + 8, generator=torch.Generator().manual_seed(5)).to(dtype)
    return whole[:, :width]


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(1, 9)), min_size=1, max_size=4).filter(
        lambda slices: sum(-(-(start + count) // PAGE_TOKENS) for start, count in slices) <= NUM_FRAMES
    ),
    st.sampled_from([1, 4]),
)
def test_pages_and_queries_have_the_bits_of_torch(
    interpreted_rows: dict[str, ModuleType], slices: list[tuple[int, int]], min_rows: int
) -> None:
    """In fp32 the kernel leaves the same bits as torch in every page and query, whatever rows begin, continue or fill
    pages: rotated keys, values, zeros after them, and NaN where nothing was written."""
    kernels, plain = both(interpreted_rows, MODEL)
    batch = batch_of(slices, min_rows)
    qkv = qkv_of(batch, MODEL)

    queries = [one.rows.plan(batch).rotate_and_store(qkv.clone(), 1, None) for one in (kernels, plain)]

    assert torch.equal(*queries)
    for layer in (0, 1):
        torch.testing.assert_close(kernels.pages(layer), plain.pages(layer), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("rope", "has_norm", "dtype"),
    [
        ("plain", True, torch.float32),
        ("plain", True, torch.float16),
        ("plain", True, torch.bfloat16),
        ("llama3", False, torch.float16),
        ("yarn", True, torch.float32),
    ],
)
def test_heads_are_normalised_and_rotated_as_in_torch(
    interpreted_rows: dict[str, ModuleType], rope: str, has_norm: bool, dtype: torch.dtype
) -> None:
    """Norms of heads and every kind of rope scaling give torch's queries and keys within rounding."""
    model = replace(MODEL, ropes=(ROPES[rope],) * 2, num_heads=5, num_kv_heads=1, head_dim=8)
    kernels, plain = both(interpreted_rows, model, dtype)
    batch = batch_of([(3, 2), (0, 1), (30, 3)])
    weight = (1 + 0.4 * torch.randn(6, 8, generator=torch.Generator().manual_seed(6))).to(dtype) if has_norm else None

    queries = [
        one.rows.plan(batch).rotate_and_store(qkv_of(batch, model, dtype), 0, weight) for one in (kernels, plain)
    ]

    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(*queries, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(kernels.pages(0), plain.pages(0), rtol=tolerance, atol=tolerance, equal_nan=True)
    if dtype == torch.float16 and not has_norm:
        assert torch.equal(*queries)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("has_norm", [False, True])
def test_each_form_of_rotation_is_that_of_torch(
    interpreted_rows: dict[str, ModuleType], form: str, has_norm: bool
) -> None:
    """Neighbours as pairs, heads that are rotated in part, and layers that rotate nothing give torch's queries, keys and
    zeros; without norms of heads with the same bits."""
    block = replace(MODEL.block, norm=NormKind.RMS_ROUNDED_ONCE)
    model = replace(MODEL, ropes=(ROPES["plain"], FORMS[form]), block=block)
    kernels, plain = both(interpreted_rows, model)
    batch = batch_of([(3, 2), (0, 1), (21, 3)])
    weight = 1 + 0.4 * torch.randn(9, 12, generator=torch.Generator().manual_seed(6)) if has_norm else None

    queries = [one.rows.plan(batch).rotate_and_store(qkv_of(batch, model), 1, weight) for one in (kernels, plain)]

    tolerance = TOLERANCE[torch.float32] if has_norm else 0
    torch.testing.assert_close(*queries, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(kernels.pages(1), plain.pages(1), rtol=tolerance, atol=tolerance, equal_nan=True)


def test_queries_and_keys_are_normalised_as_wholes(interpreted_rows: dict[str, ModuleType]) -> None:
    """Norms over all queries and all keys of a token are torch's, and leave the values as they are."""
    model = replace(MODEL, block=replace(MODEL.block, norm=NormKind.RMS_ROUNDED_ONCE))
    kernels, plain = both(interpreted_rows, model)
    qkv = qkv_of(batch_of([(0, 5)]), model)
    generator = torch.Generator().manual_seed(2)
    weights = torch.rand(72, generator=generator), torch.rand(36, generator=generator)

    results = [qkv.clone(), qkv.clone()]
    for one, result in zip((kernels, plain), results, strict=True):
        one.rows.norm_wide(result, weights)

    torch.testing.assert_close(*results, rtol=2e-6, atol=2e-6)
    assert torch.equal(results[0][:, 108:], qkv[:, 108:])
    expected = rms_norm_rounded_once(qkv[:, 72:108], weights[1], model.rms_norm_eps)
    torch.testing.assert_close(results[1][:, 72:108], expected, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_are_normalised_without_a_weight(interpreted_rows: dict[str, ModuleType], dtype: torch.dtype) -> None:
    """With rows of ones for values, their heads have the mean square 1 in the pages, and all else is torch's."""
    block = replace(MODEL.block, norm=NormKind.RMS_ROUNDED_ONCE, has_value_norm=True)
    model = replace(MODEL, block=block)
    kernels, plain = both(interpreted_rows, model, dtype)
    batch = batch_of([(3, 2), (0, 1), (21, 3)])
    weight = 1 + 0.4 * torch.randn(12, 12, generator=torch.Generator().manual_seed(6))
    weight[9:] = 1.0

    queries = [
        one.rows.plan(batch).rotate_and_store(qkv_of(batch, model, dtype), 1, weight) for one in (kernels, plain)
    ]

    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(*queries, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(kernels.pages(1), plain.pages(1), rtol=tolerance, atol=tolerance, equal_nan=True)
    values = plain.cache.layer(1)[1][batch.row_pages, batch.row_offsets].float()
    torch.testing.assert_close(values.square().mean(dim=-1), torch.ones(6, 3), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("has_value_norm", [False, True])
def test_a_layer_that_reads_another_writes_nothing(
    interpreted_rows: dict[str, ModuleType], has_value_norm: bool
) -> None:
    """It has queries alone, normalised and rotated as those of a whole layer, and leaves all pages as they are."""
    block = replace(MODEL.block, norm=NormKind.RMS_ROUNDED_ONCE, has_value_norm=has_value_norm)
    model = replace(MODEL, block=block, kv_sources=(0, 0))
    whole = side(TorchRowOps, replace(model, kv_sources=()))
    batch = batch_of([(3, 2), (0, 1), (21, 3)])
    qkv, weight = qkv_of(batch, model), torch.rand(12, 12, generator=torch.Generator().manual_seed(6))
    expected = whole.rows.plan(batch).rotate_and_store(qkv.clone(), 1, weight[: 12 if has_value_norm else 9])

    for one in both(interpreted_rows, model):
        before = one.pages(1).clone()
        query = one.rows.plan(batch).rotate_and_store(qkv[:, :72].clone(), 1, weight[:6])

        torch.testing.assert_close(query, expected, rtol=2e-6, atol=2e-6)
        torch.testing.assert_close(one.pages(1), before, rtol=0, atol=0, equal_nan=True)


def test_positions_and_pages_may_be_int32(interpreted_rows: dict[str, ModuleType]) -> None:
    """With int32 positions, pages and offsets, as in a packed block of inputs, the results have the same bits."""
    narrow, wide = (both(interpreted_rows, MODEL)[0] for _ in range(2))
    batch = batch_of([(3, 6), (8, 1), (0, 4)])
    packed = replace(
        batch,
        positions=batch.positions.int(),
        row_pages=batch.row_pages.int(),
        row_offsets=batch.row_offsets.int(),
    )

    queries = [
        one.rows.plan(own).rotate_and_store(qkv_of(batch, MODEL), 0, None)
        for one, own in ((narrow, packed), (wide, batch))
    ]

    assert torch.equal(*queries)
    torch.testing.assert_close(narrow.pages(0), wide.pages(0), rtol=0, atol=0, equal_nan=True)


def test_a_row_has_the_same_bits_alone(interpreted_rows: dict[str, ModuleType]) -> None:
    """A decoding row gives the same query and the same KV alone and beside other rows."""
    alone, together = (both(interpreted_rows, MODEL)[0] for _ in range(2))
    small, large = batch_of([(9, 1)]), batch_of([(9, 1), (0, 6), (2, 1)])
    row = large.row_pages.tolist().index(11 - 2)
    qkv = qkv_of(large, MODEL)
    weight = torch.rand(9, 12, generator=torch.Generator().manual_seed(1))

    query = alone.rows.plan(small).rotate_and_store(qkv[row : row + 1], 0, weight)
    queries = together.rows.plan(large).rotate_and_store(qkv, 0, weight)

    assert torch.equal(query[0], queries[row])
    torch.testing.assert_close(alone.pages(0)[:, 9], together.pages(0)[:, 9], rtol=0, atol=0, equal_nan=True)


def test_strides_that_do_not_fit_are_refused(interpreted_rows: dict[str, ModuleType]) -> None:
    """A qkv whose features are not adjacent is refused before the launch."""
    kernels, _ = both(interpreted_rows, MODEL)
    batch = batch_of([(0, 3)])

    with pytest.raises(ValueError, match="must be contiguous"):
        kernels.rows.plan(batch).rotate_and_store(qkv_of(batch, MODEL).t().contiguous().t(), 0, None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("kv_dtype", ["auto", "int8", "fp8"])
def test_the_trial_at_start_passes(interpreted_rows: dict[str, ModuleType], dtype: torch.dtype, kv_dtype: str) -> None:
    """The trial that an engine makes at its start finds no difference between the kernels and torch."""
    selftest = interpreted_rows["graftwork.engine.runner.row_selftest"]

    assert selftest.why_row_kernels_fail(torch.device("cpu"), dtype, kv_dtype=kv_dtype) is None


def test_the_trial_at_start_tells_what_is_wrong(
    interpreted_rows: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a kernel cannot run or its results are wrong, the trial returns the reason instead of raising."""
    selftest = interpreted_rows["graftwork.engine.runner.row_selftest"]
    kernels = selftest.TritonRowOps
    cpu = torch.device("cpu")

    class Wrong(kernels):  # type: ignore[misc, valid-type]
        def activate(self, gate_up: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = 1.01 * super().activate(gate_up)
            return result

    monkeypatch.setattr(selftest, "TritonRowOps", Wrong)
    assert "differ from plain torch by 0.01" in selftest.why_row_kernels_fail(cpu, torch.float32)
    monkeypatch.setattr(kernels, "norm", None)
    assert "TypeError" in selftest.why_row_kernels_fail(cpu, torch.float32)
