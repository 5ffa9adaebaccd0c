"""Turns MXFP4 weights into floating point numbers, as the checkpoint of gpt-oss holds its experts.

32 neighbours of a row form a block: 16 bytes with two numbers each, the first in the low half, and one byte for their
common power of two. A number has 4 bits: a sign, two bits of exponent and one of mantissa. Owns no weights. Exact in
float32 and bfloat16.

Source: OCP Microscaling Formats (MX) Specification 1.0 (2023), section 5.
"""

import torch

_EXPONENT_BIAS = 127
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def from_mxfp4(blocks: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns the numbers of some rows: [..., num_blocks * 32] in `dtype`.

    blocks: uint8 [..., num_blocks, 16]; scales: uint8 [..., num_blocks].
    """
    values = torch.tensor([*_VALUES, *(-value for value in _VALUES)], device=blocks.device)
    halves = torch.stack([blocks & 0x0F, blocks >> 4], dim=-1).flatten(-2)  # [..., num_blocks, 32]
    exponents = scales.to(torch.int32) - _EXPONENT_BIAS
    numbers = torch.ldexp(values[halves.long()], exponents.unsqueeze(-1))  # fp32
    return numbers.to(dtype).flatten(-2)
