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
    numbers = float4_values(nibbles_of(blocks)).view(*scales.shape, -1)  # [..., num_blocks, 32] fp32
    return (numbers * powers_of_two(scales).unsqueeze(-1)).to(dtype).flatten(-2)


def nibbles_of(blocks: torch.Tensor) -> torch.Tensor:
    """Returns the codes of blocks, uint8 from 0 to 15: [..., num_blocks * 32]. blocks: uint8 [..., num_blocks, 16]."""
    return torch.stack([blocks & 0x0F, blocks >> 4], dim=-1).flatten(-3)


def float4_values(codes: torch.Tensor) -> torch.Tensor:
    """Returns the fp32 number of each code, uint8 from 0 to 15, in the shape of `codes`."""
    values = torch.tensor([*_VALUES, *(-value for value in _VALUES)], device=codes.device)
    return values[codes.long()]


def powers_of_two(scales: torch.Tensor) -> torch.Tensor:
    """Returns 2 ** (number - 127) in fp32 for each number, uint8, in the shape of `scales`. 255 gives infinity."""
    exponents = scales.to(torch.int32) - _EXPONENT_BIAS
    return torch.ldexp(torch.ones_like(exponents, dtype=torch.float32), exponents)
