"""Makes random adapters for tests and measurements of the kernels."""

from collections.abc import Sequence

import torch

from graftwork.engine.lora.triton.slice_table import SliceTerms
from graftwork.engine.lora.weights import LoraPair


def random_pair(
    rank: int, in_features: int, width: int, dtype: torch.dtype, generator: torch.Generator, scale: float = 1.0
) -> LoraPair:
    """Returns random low-rank factors A and B of one linear layer.

    If the input of the layer is standard normal, the delta is about standard normal too, times `scale`.
    """
    A = torch.randn(rank, in_features, generator=generator) / in_features**0.5
    B = torch.randn(width, rank, generator=generator) / rank**0.5
    return LoraPair(A.to(dtype), B.to(dtype), scale)


def random_slots(
    ranks: Sequence[Sequence[int]],
    in_features: int,
    slice_widths: Sequence[int],
    dtype: torch.dtype,
    generator: torch.Generator,
) -> list[list[LoraPair | None]]:
    """Returns random adapters of one fused layer, one for each slot (place for one adapter).

    `ranks` has one entry for each slot: the ranks of the adapter's slices (projections, such as q of qkv). With rank 0,
    the adapter does not change the slice.
    """
    return [
        [
            random_pair(rank, in_features, width, dtype, generator, scale=0.5 + 0.25 * slot + 0.125 * index)
            if rank
            else None
            for index, (rank, width) in enumerate(zip(slot_ranks, slice_widths, strict=True))
        ]
        for slot, slot_ranks in enumerate(ranks)
    ]


def with_random_columns(
    pairs: Sequence[LoraPair | None], slice_widths: Sequence[int], generator: torch.Generator
) -> list[SliceTerms]:
    """Returns an adapter that has the factors `pairs` and also scales and shifts output columns, as DoRA and biases do.

    The random scales are near 1. The random shifts are standard normal.
    """
    return [
        SliceTerms(pair, 1 + 0.1 * torch.randn(width, generator=generator), torch.randn(width, generator=generator))
        for pair, width in zip(pairs, slice_widths, strict=True)
    ]
