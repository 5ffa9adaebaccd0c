"""Makes random adapters, with which the kernels are tested and measured."""

from collections.abc import Sequence

import torch

from graftwork.engine.lora.triton.slice_table import SliceTerms
from graftwork.engine.lora.weights import LoraPair


def random_pair(
    rank: int, in_features: int, width: int, dtype: torch.dtype, generator: torch.Generator, scale: float = 1.0
) -> LoraPair:
    """Returns a random pair of matrices A and B. If x is standard normal, the delta is about standard normal too."""
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
    """Returns random adapters by slot. `ranks` holds a rank for each slot and slice. With rank 0 the slice is
    unchanged.
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
    """Returns an adapter with random columns added: scales near 1 and shifts near 0, as DoRA and biases have."""
    return [
        SliceTerms(pair, 1 + 0.1 * torch.randn(width, generator=generator), torch.randn(width, generator=generator))
        for pair, width in zip(pairs, slice_widths, strict=True)
    ]
