"""Lays out the parameters of one step for the sampling kernels: numbers for each row, and lists of tokens.

All of it stands in one array of int32, so that one copy carries it to the device:

    int32 columns | fp32 columns | int64 columns | lists

A column has one number for each row, up to the capacity. The lists follow without gaps; an int32 column says where a
row's lists begin and end. Knows nothing of torch or Triton.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from graftwork.engine.core.sampling import SamplingParams
from graftwork.engine.core.step import SampleSpec
from graftwork.engine.sampling.top_k_top_p import truncates


class Way(IntEnum):
    """How the token of a row is chosen."""

    IDLE = 0
    """The row does not exist: the batch is smaller than the buffers."""
    GREEDY = 1
    BY_TOKEN = 2
    """Drawn from all tokens, in the order of their ids. Min-p may drop some."""
    BY_RANK = 3
    """Drawn from what top-k, top-p and min-p keep, the likeliest first."""


class Int(IntEnum):
    """The int32 columns."""

    WAY = 0
    TOP_K = 1
    """0 if the row has no top-k."""
    LOGPROBS = 2
    """1 if the request asks for the log probability of the chosen token, 2 if also for likely tokens, else 0."""
    MASK = 3
    """The row's number among the grammar masks; -1 without a grammar."""
    COUNTS = 4
    """The row's slot in the table of token counts; -1 without penalties."""
    CHANGES = 5
    """Where the row's list of changed counts begins, in int32 words: pairs (token, new entry of the table)."""
    CHANGES_END = 6
    DRAFTS = 7
    """Where the row's draft tokens begin. The penalties count them too.

    An awaited token stands here as -1 - its place among the tokens of the step before, which the device alone knows.
    """
    DRAFTS_END = 8
    BIASES = 9
    """Where the row's list of biases begins: pairs (token, bits of the fp32 bias). A banned token's bias is -inf."""
    BIASES_END = 10


class Float(IntEnum):
    """The fp32 columns."""

    TEMPERATURE = 0
    TOP_P = 1
    """Infinite if the row has no top-p."""
    FARTHEST = 2
    """How far below the best logit a token may be for min-p to keep it, after the temperature; infinite for min-p 0."""
    REPETITION = 3
    FREQUENCY = 4
    PRESENCE = 5


class Long(IntEnum):
    """The int64 columns: what the noise is made of."""

    SEED = 0
    CHOICE = 1
    POSITION = 2


@dataclass(frozen=True, slots=True)
class CountChanges:
    """What the kernels must know about the penalties of one row."""

    slot: int
    """The row of the table with the request's token counts."""
    changes: NDArray[np.int32]  # [changes, 2] each a token and its new entry in the table


@dataclass(frozen=True, slots=True)
class StepColumns:
    """The sizes of the parts of a parameter block for `capacity` rows."""

    capacity: int
    """A multiple of 4, so that each part begins at a multiple of 16 bytes."""

    @property
    def floats_at(self) -> int:
        return len(Int) * self.capacity

    @property
    def longs_at(self) -> int:
        return self.floats_at + len(Float) * self.capacity

    @property
    def lists_at(self) -> int:
        return self.longs_at + 2 * len(Long) * self.capacity


@dataclass(frozen=True, slots=True)
class StepParameters:
    """The parameters of one step, ready to be written to a block."""

    ints: NDArray[np.int32]  # [rows, len(Int)]
    floats: NDArray[np.float32]  # [rows, len(Float)]
    longs: NDArray[np.uint64]  # [rows, len(Long)]
    lists: NDArray[np.int32]  # [list words]

    def num_words(self, layout: StepColumns) -> int:
        """Returns how many words of a block with this layout are used. The words after them need not be copied."""
        return layout.lists_at + len(self.lists)

    def write_to(self, block: NDArray[np.int32], layout: StepColumns) -> None:
        """Writes the columns and the lists to a block of at least `num_words` words. Rows beyond the step's are idle.

        Raises ValueError if the step has more rows than the layout.
        """
        num_rows = len(self.ints)
        if num_rows > layout.capacity:
            raise ValueError(f"the step samples {num_rows} rows, but the block has room for {layout.capacity}")
        shape = (-1, layout.capacity)
        ints = block[: layout.floats_at].reshape(shape)
        ints[Int.WAY, num_rows:] = Way.IDLE
        ints[:, :num_rows] = self.ints.T
        floats = block[layout.floats_at :][: len(Float) * layout.capacity].view(np.float32).reshape(shape)
        floats[:, :num_rows] = self.floats.T
        longs = block[layout.longs_at : layout.lists_at].view(np.uint64).reshape(shape)
        longs[:, :num_rows] = self.longs.T
        block[layout.lists_at : self.num_words(layout)] = self.lists


def pack(
    specs: Sequence[SampleSpec],
    counts: Sequence[CountChanges | None],
    vocab_size: int,
    sources: Sequence[int | None] | None = None,
) -> StepParameters:
    """Returns the parameters of a step. `specs`, `counts` and `sources` have one entry for each row.

    `counts` is None for a row without penalties. `sources` says where the token right before the row's position is among
    those of the step before, if the row's counts lack it.
    """
    lists = _Lists()
    ints = []
    num_masks = 0
    for spec, own, source in zip(specs, counts, sources or [None] * len(specs), strict=True):
        params = spec.params
        mask = -1
        if spec.mask is not None:
            mask, num_masks = num_masks, num_masks + 1
        changes = lists.add(own.changes if own is not None else ())
        awaited = () if source is None else (-1 - source,)
        drafts = lists.add((*awaited, *spec.draft_token_ids) if own is not None else ())
        biases = lists.add(_biases(spec) if params.logit_bias or spec.banned_token_ids else ())
        top_k = 0 if params.top_k is None else min(params.top_k, vocab_size)
        logprobs = 0 if params.logprobs is None else 1 + (params.logprobs > 0)
        slot = -1 if own is None else own.slot
        ints.append((way_of(spec), top_k, logprobs, mask, slot, *changes, *drafts, *biases))
    return StepParameters(
        np.array(ints, dtype=np.int32).reshape(-1, len(Int)),
        np.array([_floats(spec.params) for spec in specs], dtype=np.float32).reshape(-1, len(Float)),
        np.array([_longs(spec) for spec in specs], dtype=np.uint64).reshape(-1, len(Long)),
        lists.words(),
    )


def way_of(spec: SampleSpec) -> Way:
    """Returns how the token of a row is chosen."""
    if spec.params.is_greedy:
        return Way.GREEDY
    return Way.BY_RANK if truncates(spec) else Way.BY_TOKEN


class _Lists:
    """Joins lists of int32 words."""

    def __init__(self) -> None:
        self._parts: list[NDArray[np.int32]] = []
        self._end = 0

    def add(self, values: Sequence[int] | NDArray[np.int32]) -> tuple[int, int]:
        """Appends a list. Returns where it begins and where it ends."""
        start = self._end
        if len(values):
            part = np.asarray(values, dtype=np.int32).reshape(-1)
            self._parts.append(part)
            self._end += len(part)
        return start, self._end

    def words(self) -> NDArray[np.int32]:
        return np.concatenate(self._parts) if self._parts else np.empty(0, dtype=np.int32)


def _biases(spec: SampleSpec) -> NDArray[np.int32]:
    """Returns pairs (token, bits of its fp32 bias), each token once. A banned token's bias is -inf."""
    added = {**dict(spec.params.logit_bias), **dict.fromkeys(spec.banned_token_ids, -np.inf)}
    pairs = np.empty((len(added), 2), dtype=np.int32)
    pairs[:, 0] = np.fromiter(added, dtype=np.int32, count=len(added))
    pairs[:, 1] = np.fromiter(added.values(), dtype=np.float32, count=len(added)).view(np.int32)
    return pairs


def _floats(params: SamplingParams) -> tuple[float, ...]:
    return (
        params.temperature,
        params.top_p if params.top_p < 1 else np.inf,
        _farthest(params.min_p),
        params.repetition_penalty,
        params.frequency_penalty,
        params.presence_penalty,
    )


def _farthest(min_p: float) -> float:
    """Returns the largest fp32 number d for which exp(-d) is at least min_p in fp32."""
    least = np.float64(np.float32(min_p))
    if least <= 0:
        return np.inf
    limit = -np.log(least)
    nearest = np.float32(limit)
    return float(nearest if nearest <= limit else np.nextafter(nearest, np.float32(-np.inf)))


def _longs(spec: SampleSpec) -> tuple[int, int, int]:
    word = (1 << 64) - 1
    return spec.seed & word, spec.params.choice & word, spec.position
