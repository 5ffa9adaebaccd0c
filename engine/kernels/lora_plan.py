"""Block sizes of the kernels, by shape: a plain function, so that a plan is the same in every process.

The bits of a row must not depend on its neighbours. What they depend on is therefore kept apart from what the batch
decides:

- How the input features are summed (`num_spans`, `block_in`) follows from the layer alone. Whether the spans run in
  one program or in several (`parallel_spans`) follows from the batch; either way they are summed in the same order.
- Tiles have at most 32 rows, so that every architecture uses the same matrix instruction (mma.sync) for all of them;
  from 64 rows on the compiler would turn to wgmma or tcgen05, which accumulate differently.
"""

from dataclasses import dataclass

_SPAN_FEATURES = 512  # what one program should sum at least, to be worth its launch
_MAX_SPANS = 8  # the expand kernel reads one plane of scratch for each
_BUSY_PROGRAMS = 256  # about two a multiprocessor: above this the device is full without parallel spans


@dataclass(frozen=True, slots=True)
class LoraPlan:
    """How the pair of kernels is launched for one fused layer and one step."""

    block_in: int
    """Input features that a shrink program loads at once."""
    block_rank: int
    block_out: int
    num_spans: int
    """Parts that the input features are summed in."""
    parallel_spans: bool
    """One program a span, and one plane of scratch each, rather than one program for all."""
    num_stages: int

    @property
    def num_planes(self) -> int:
        return self.num_spans if self.parallel_spans else 1

    def rank_blocks(self, max_rank: int) -> int:
        return -(-max_rank // self.block_rank)

    def span_features(self, in_features: int) -> int:
        """Input features of a span: whole blocks."""
        per_span = -(-in_features // self.num_spans)
        return -(-per_span // self.block_in) * self.block_in


def plan_for(num_tiles: int, num_slices: int, in_features: int, max_rank: int, element_bytes: int) -> LoraPlan:
    """The plan of a layer in a step of `num_tiles` tiles; `element_bytes` are those of the wider operand."""
    block_rank = min(max(16, 1 << (max_rank - 1).bit_length()), 64)
    num_spans = min(max(in_features // _SPAN_FEATURES, 1), _MAX_SPANS)
    programs = num_tiles * num_slices * -(-max_rank // block_rank)
    return LoraPlan(
        block_in=128 if element_bytes <= 2 else 64,
        block_rank=block_rank,
        block_out=128 if block_rank <= 32 else 64,
        num_spans=num_spans,
        parallel_spans=num_spans > 1 and programs < _BUSY_PROGRAMS,
        num_stages=3 if element_bytes <= 2 else 2,
    )
