"""Tests of keys and values that the row kernels write in bytes, interpreted, against those that torch writes."""

from types import ModuleType

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from graftwork.engine.runner.input_batch import BatchTensors
from tests.engine.runner.row_sides import MODEL, NUM_FRAMES, PAGE_TOKENS, Side, batch_of
from tests.engine.runner.test_row_ops import both

pytestmark = [
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),
]
FORMS = pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
WIDTH = (MODEL.num_heads + 2 * MODEL.num_kv_heads) * MODEL.head_dim


def heads_of_all_sizes(num_rows: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Rows of queries, keys and values: each head has a size of its own, and some heads are zeros."""
    generator = torch.Generator().manual_seed(seed)
    heads = torch.randn(num_rows, WIDTH // MODEL.head_dim, MODEL.head_dim, generator=generator)
    most = 3 if dtype == torch.float16 else 30
    sizes = 10.0 ** torch.randint(-most, most + 1, heads.shape[:2], generator=generator)
    sizes[torch.rand(sizes.shape, generator=generator) < 0.1] = 0.0
    return (heads * sizes[..., None]).to(dtype).flatten(1)


def write(sides: tuple[Side, Side], batch: BatchTensors, qkv: torch.Tensor) -> None:
    for one in sides:
        one.rows.plan(batch).rotate_and_store(qkv.clone(), 1, None)


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(1, 9)), min_size=1, max_size=4).filter(
        lambda slices: sum(-(-(start + count) // PAGE_TOKENS) for start, count in slices) <= NUM_FRAMES
    ),
    st.sampled_from([1, 4]),
    st.integers(0, 1000),
)
@FORMS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_pages_have_the_bytes_of_torch(
    interpreted_rows: dict[str, ModuleType],
    dtype: torch.dtype,
    kv_dtype: str,
    slices: list[tuple[int, int]],
    min_rows: int,
    seed: int,
) -> None:
    """The kernel leaves the same codes and scales as torch in every page, whatever rows begin, continue or fill pages, and
    however large the heads are: also zeros after them, and what nobody has written."""
    kernels, plain = both(interpreted_rows, MODEL, dtype, kv_dtype)
    batch = batch_of(slices, min_rows)

    write((kernels, plain), batch, heads_of_all_sizes(len(batch.token_ids), dtype, seed))

    for layer in (0, 1):
        assert torch.equal(kernels.pages(layer), plain.pages(layer))
        assert torch.equal(kernels.scales(layer), plain.scales(layer))


@FORMS
def test_a_row_has_the_same_bytes_alone(interpreted_rows: dict[str, ModuleType], kv_dtype: str) -> None:
    """A decoding row writes the same codes and scales alone and beside other rows, into a page that holds tokens."""
    alone, together = (both(interpreted_rows, MODEL, kv_dtype=kv_dtype)[0] for _ in range(2))
    small, large = batch_of([(9, 1)]), batch_of([(9, 1), (0, 6), (2, 1)])
    qkv = heads_of_all_sizes(len(large.token_ids), torch.float32, 3)

    alone.rows.plan(small).rotate_and_store(qkv[:1], 0, None)
    together.rows.plan(large).rotate_and_store(qkv, 0, None)

    page = int(small.row_pages[0])
    assert torch.equal(alone.pages(0)[:, page], together.pages(0)[:, page])
    assert torch.equal(alone.scales(0)[:, page], together.scales(0)[:, page])


@FORMS
@pytest.mark.parametrize("broken", [float("nan"), float("inf"), float("-inf")])
def test_a_head_that_is_not_finite_stays_so(
    interpreted_rows: dict[str, ModuleType], kv_dtype: str, broken: float
) -> None:
    """A head with NaN or an infinity reads as no finite number, so that it is found later; other heads have their bytes."""
    kernels, plain = both(interpreted_rows, MODEL, kv_dtype=kv_dtype)
    batch = batch_of([(0, 3)])
    qkv = heads_of_all_sizes(3, torch.float32, 4)
    first_value = (MODEL.num_heads + MODEL.num_kv_heads) * MODEL.head_dim
    whole = qkv.clone()
    qkv[1, first_value + 5] = broken

    kernels.rows.plan(batch).rotate_and_store(qkv, 1, None)
    plain.rows.plan(batch).rotate_and_store(whole, 1, None)

    page = batch.row_pages[:1]
    found, expected = (one.cache.format.decode(one.cache.stored(1)[1].at_pages(page))[0] for one in (kernels, plain))
    assert not found[1, 0].isfinite().any()
    found[1, 0] = expected[1, 0]
    assert torch.equal(found, expected)
