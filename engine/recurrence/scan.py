"""Computes the recurrence of Mamba-2 token by token: in torch, and on a CPU by a compiled loop where that works.

Each operation on the state has the shape of one token, and each other operation works on rows that do not touch. So the bits
of a token follow from the tokens of its request before it, and neither from how a prompt is cut into chunks nor from
other requests in the step.
"""

import logging
from functools import cache
from importlib.util import find_spec
from typing import Protocol

import torch
from torch.nn import functional

from graftwork.engine.model.part_weights import RecurrentWeights

_log = logging.getLogger(__name__)
_SEED, _TOLERANCE = 20262, 1e-5
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

    window: fp32 [conv_tokens - 1 + num_tokens, ..., conv_width], the inputs before the tokens first. Returns [num_tokens,
    ..., conv_width].
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


class Scan(Protocol):
    """Advances the state of all heads of a layer by some tokens."""

    def __call__(
        self,
        heads: torch.Tensor,
        decays: torch.Tensor,
        values: torch.Tensor,
        B: torch.Tensor,
        C: torch.Tensor,
        y: torch.Tensor,
    ) -> None:
        """Changes `heads`, [heads, state_size, head_dim], and writes what each token reads from it into `y`, [num_tokens,
        heads, head_dim].

        decays: [num_tokens, heads]; values: [num_tokens, heads, head_dim], times step sizes; B, C: [num_tokens, groups,
        state_size]. All are fp32.
        """
        ...


def torch_scan(
    heads: torch.Tensor, decays: torch.Tensor, values: torch.Tensor, B: torch.Tensor, C: torch.Tensor, y: torch.Tensor
) -> None:
    """Computes Scan in torch. The reference of the compiled loop."""
    num_groups = B.shape[1]
    by_group = heads.view(num_groups, -1, *heads.shape[1:])  # [groups, heads of a group, state_size, head_dim]
    decays = decays[:, :, None, None]
    grouped = (len(decays), num_groups, -1, values.shape[2])
    values = values.reshape(grouped).unsqueeze(3)  # [num_tokens, groups, heads of a group, 1, head_dim]
    B, C = B[:, :, None, :, None], C[:, :, None, :, None]  # [num_tokens, groups, 1, state_size, 1]
    read = y.view(grouped)  # [num_tokens, groups, heads of a group, head_dim]
    for token in range(len(decays)):
        heads.mul_(decays[token])
        by_group.add_(B[token] * values[token])
        torch.sum(by_group * C[token], dim=2, out=read[token])


def compiled_scan(
    heads: torch.Tensor, decays: torch.Tensor, values: torch.Tensor, B: torch.Tensor, C: torch.Tensor, y: torch.Tensor
) -> None:
    """Computes Scan by the compiled loop. All tensors are on a CPU; heads, values and y are contiguous."""
    from graftwork.engine.recurrence.cpu_kernel import advance

    advance(heads.numpy(), decays.numpy(), values.numpy(), B.numpy(), C.numpy(), y.numpy())


@cache
def choose_scan() -> Scan:
    """Returns the compiled loop if it works on this machine, else torch. The log says why if it does not."""
    reason = "numba is not installed" if find_spec("numba") is None else _why_compiled_fails()
    if reason is None:
        return compiled_scan
    loss = "recurrent layers compute prompts some three times slower"
    _log.warning("recurrent_kernel_unavailable", extra={"reason": reason, "loss": loss})
    return torch_scan


def _why_compiled_fails() -> str | None:
    """Returns how the compiled loop differs from torch for random rows; None if it does not. Compiles it, or loads it."""
    generator = torch.Generator().manual_seed(_SEED)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    heads, rows = random(4, 5, 19), (random(7, 4).sigmoid(), random(7, 4, 19), random(7, 2, 5), random(7, 2, 5))
    states, outputs = [heads.clone(), heads.clone(), heads.clone()], [torch.empty(7, 4, 19) for _ in range(3)]
    try:
        torch_scan(states[0], *rows, outputs[0])
        compiled_scan(states[1], *rows, outputs[1])
        for token in range(7):
            decays, values, B, C = (part[token : token + 1] for part in rows)
            compiled_scan(states[2], decays, values, B, C, outputs[2][token : token + 1])
    except Exception as error:  # noqa: BLE001 - a compiler and its libraries fail in ways of their own
        return f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), 'no message')}"
    if not torch.equal(states[0], states[1]) or not torch.allclose(outputs[0], outputs[1], _TOLERANCE, _TOLERANCE):
        return "the states or outputs differ from torch's"
    same = torch.equal(states[1], states[2]) and torch.equal(outputs[1], outputs[2])
    return None if same else "the bits of a token depend on its neighbours"
