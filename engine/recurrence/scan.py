"""Computes the recurrence of Mamba-2 token by token, in torch.

Each operation on the state has the shape of one token, and each other operation works on rows that do not touch. So the bits
of a token follow from the tokens of its request before it, and neither from how a prompt is cut into chunks nor from
other requests in the step.
"""

import torch
from torch.nn import functional

from graftwork.engine.model.recurrent_weights import RecurrentWeights
from graftwork.engine.recurrence.state_pages import LayerStates

_ROW_ITEMS = 16
"""Rows that do not touch begin at multiples of so many numbers: 64 bytes of fp32."""


def apart(x: torch.Tensor) -> torch.Tensor:
    """Returns a copy of x, fp32 [num_rows, features], whose rows do not touch in memory.

    torch computes functions such as exp in blocks, and the rest of a row of memory in another way, which gives other
    bits. Rows that touch are one row to it, so that a token's place in the step would decide about its bits.
    """
    rows, features = x.shape
    copied = torch.empty((rows, (features // _ROW_ITEMS + 2) * _ROW_ITEMS), dtype=torch.float32, device=x.device)
    return copied[:, :features].copy_(x)


def convolve(window: torch.Tensor, weights: RecurrentWeights) -> torch.Tensor:
    """Returns the causal convolution over time.

    window: fp32 [conv_tokens - 1 + num_tokens, conv_width], the inputs before the tokens first. Returns [num_tokens,
    conv_width].
    """
    taps = weights.conv
    count = len(window) - len(taps) + 1
    mixed = window[:count] * taps[0]
    for number, tap in enumerate(taps[1:], start=1):
        mixed += window[number : number + count] * tap
    return mixed if weights.conv_bias is None else mixed.add_(weights.conv_bias)


def step_sizes(dt: torch.Tensor, weights: RecurrentWeights) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the step size of each head, and the factor by which its state decays. Both are fp32 [num_tokens, heads].

    dt: fp32 [num_tokens, heads], as in_proj gives it.
    """
    sizes = functional.softplus(apart(dt + weights.dt_bias))
    return sizes, torch.exp(apart(sizes * weights.decay))


def scan(
    state: LayerStates,
    decays: torch.Tensor,
    values: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    y: torch.Tensor,
) -> None:
    """Advances the state of all heads by some tokens, and writes what each token reads from it into `y`.

    decays: [num_tokens, heads]; values: [num_tokens, heads, head_dim], times step sizes; B, C: [num_tokens, groups,
    state_size]; y: [num_tokens, heads, head_dim]. All are fp32. Changes `state.heads`, [heads, state_size, head_dim].
    """
    num_groups = B.shape[1]
    heads = state.heads
    by_group = heads.unflatten(0, (num_groups, -1))  # [groups, heads of a group, state_size, head_dim]
    decays = decays[:, :, None, None]
    values = values.unflatten(1, (num_groups, -1)).unsqueeze(3)  # [num_tokens, groups, heads of a group, 1, head_dim]
    B, C = B[:, :, None, :, None], C[:, :, None, :, None]  # [num_tokens, groups, 1, state_size, 1]
    read = y.unflatten(1, (num_groups, -1))  # [num_tokens, groups, heads of a group, head_dim]
    for token in range(len(decays)):
        heads.mul_(decays[token])
        by_group.add_(B[token] * values[token])
        torch.sum(by_group * C[token], dim=2, out=read[token])
