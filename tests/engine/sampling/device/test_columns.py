"""The parameters of a step, as the kernels will find them."""

from random import Random

import numpy as np
import pytest
from numpy.typing import NDArray

from graftwork.engine.core.sampling import SamplingParams
from graftwork.engine.core.step import SampleSpec
from graftwork.engine.sampling.device.columns import CountChanges, Float, Int, Long, StepColumns, Way, pack
from tests.engine.sampling.device.sampler_cases import random_spec


def block_of(specs: list[SampleSpec], capacity: int) -> tuple[NDArray[np.int32], StepColumns]:
    layout = StepColumns(capacity)
    parameters = pack(specs, [None] * len(specs), 1000)
    block = np.full(parameters.num_words(layout), -7, dtype=np.int32)
    parameters.write_to(block, layout)
    return block, layout


def test_every_part_is_aligned_and_none_overlap() -> None:
    """The fp32 and int64 columns and the lists begin at multiples of 16 bytes, one behind the other."""
    for capacity in (4, 16, 20, 64):
        layout = StepColumns(capacity)
        starts = [0, layout.floats_at, layout.longs_at, layout.lists_at]

        assert [4 * start % 16 for start in starts] == [0, 0, 0, 0]
        assert np.diff(starts).tolist() == [11 * capacity, 6 * capacity, 3 * 2 * capacity]


def test_rows_beyond_the_step_are_idle() -> None:
    """A block for 16 rows that had other rows before leaves the rows after the step's own idle."""
    source = Random(1)
    block, layout = block_of([random_spec(source, 1000) for _ in range(3)], 16)

    ways = block[Int.WAY * layout.capacity :][: layout.capacity]
    assert (ways[:3] != Way.IDLE).all()
    assert (ways[3:] == Way.IDLE).all()


def test_numbers_keep_all_their_bits() -> None:
    """Seeds of 64 bits, choices above 2^32 and temperatures arrive as they are."""
    params = SamplingParams(max_tokens=1, temperature=0.3, choice=2**40 + 1)
    block, layout = block_of([SampleSpec(params, 2**64 - 3, 77)] * 2, 4)

    longs = block[layout.longs_at : layout.lists_at].view(np.uint64).reshape(-1, 4)
    floats = block[layout.floats_at : layout.longs_at].view(np.float32).reshape(-1, 4)
    assert longs[Long.SEED, 1] == 2**64 - 3
    assert longs[Long.CHOICE, 1] == 2**40 + 1
    assert longs[Long.POSITION, 1] == 77
    assert floats[Float.TEMPERATURE, 1] == np.float32(0.3)


def test_a_banned_token_has_one_bias() -> None:
    """A token that is banned and biased is listed once, with minus infinity; two rows' lists do not overlap."""
    params = SamplingParams(max_tokens=1, logit_bias=((3, 2.0), (5, 1.5)))
    block, layout = block_of([SampleSpec(params, 0, 0, (5, 9)), SampleSpec(params, 0, 0)], 4)

    lists = []
    for row in range(2):
        start, end = (block[column * 4 + row] for column in (Int.BIASES, Int.BIASES_END))
        pairs = block[layout.lists_at :][start:end].reshape(-1, 2)
        lists.append(dict(zip(pairs[:, 0].tolist(), pairs[:, 1].copy().view(np.float32).tolist(), strict=True)))
    assert lists == [{3: 2.0, 5: float("-inf"), 9: float("-inf")}, {3: 2.0, 5: 1.5}]


@pytest.mark.parametrize("min_p", [1e-30, 1e-4, 0.05, 0.1, 0.3, 0.5, 0.999, 1.0])
def test_min_p_becomes_the_farthest_distance(min_p: float) -> None:
    """The distance d is the last fp32 number for which exp(-d) is at least min_p; min-p 0 has no limit."""
    block, layout = block_of([SampleSpec(SamplingParams(max_tokens=1, min_p=p), 0, 0) for p in (min_p, 0.0)], 4)

    farthest, unlimited = block[layout.floats_at :][Float.FARTHEST * 4 :][:2].view(np.float32)
    beyond = np.nextafter(farthest, np.float32(np.inf))
    assert float(farthest) <= -np.log(float(np.float32(min_p))) < float(beyond)
    assert unlimited == np.inf


def test_a_step_larger_than_the_block_is_refused() -> None:
    """Five rows do not fit a block for four, and the error says so."""
    with pytest.raises(ValueError, match="5 rows, but the block has room for 4"):
        block_of([SampleSpec(SamplingParams(max_tokens=1), 0, 0)] * 5, 4)


def test_a_changed_count_comes_with_its_row_alone() -> None:
    """The changes of a request's counts are in the list of its row; other rows have no slot."""
    specs = [SampleSpec(SamplingParams(max_tokens=1), 0, 0)] * 2
    changes = CountChanges(6, np.array([[4, 3], [9, 2]], dtype=np.int32))
    parameters = pack(specs, [None, changes], 1000)

    assert parameters.ints[:, Int.COUNTS].tolist() == [-1, 6]
    assert parameters.lists.tolist() == [4, 3, 9, 2]
    assert parameters.ints[1, [Int.CHANGES, Int.CHANGES_END]].tolist() == [0, 4]
