"""Rotary position embedding, in the half-split form of Hugging Face's Llama.

Source: RoFormer, Su et al. 2021 (arXiv 2104.09864).
"""

import torch


class RotaryTable:
    """Cosines and sines of every position of the context, computed once in fp32."""

    def __init__(self, head_dim: int, theta: float, context_tokens: int, device: torch.device) -> None:
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        angles = torch.outer(torch.arange(context_tokens, dtype=torch.float32), theta**-exponents)
        both = torch.cat([angles, angles], dim=1)  # [context, head_dim]
        self._cos = both.cos().to(device)
        self._sin = both.sin().to(device)

    def at(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines of some positions, to be broadcast over heads.  # [num_tokens, 1, head_dim] each"""
        return self._cos[positions].unsqueeze(1), self._sin[positions].unsqueeze(1)

    def rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Rotate queries or keys; computed in fp32, returned in the dtype of x.  # [num_tokens, heads, head_dim]"""
        first, second = x.chunk(2, dim=-1)
        turned = torch.cat([-second, first], dim=-1)
        return (x * cos + turned * sin).to(x.dtype)
