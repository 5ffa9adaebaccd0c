"""Chooses tokens: greedy, or sampled with noise that depends on (seed, position, token) and on nothing else.

One pipeline for all rows, in this order: banned tokens, temperature, top-k, top-p, min-p, then the Gumbel-max draw.
The noise is a counter-based hash, so a seeded request gets the same tokens whatever else is in the batch.
"""

from collections.abc import Sequence

import torch

from graftwork.engine.batch import SampleSpec

_NEVER = float("-inf")
_WORD = (1 << 64) - 1


def choose_tokens(logits: torch.Tensor, specs: Sequence[SampleSpec]) -> list[int]:
    """One token a row. logits: [rows, vocab] in fp32, changed in place where tokens are banned."""
    for row, spec in enumerate(specs):
        if spec.banned_token_ids:
            logits[row, list(spec.banned_token_ids)] = _NEVER
    chosen = logits.argmax(dim=-1)
    drawn = [row for row, spec in enumerate(specs) if spec.params.temperature > 0]
    if drawn:
        chosen[drawn] = _draw(logits[drawn], [specs[row] for row in drawn])
    return [int(token) for token in chosen.tolist()]


def _draw(logits: torch.Tensor, specs: Sequence[SampleSpec]) -> torch.Tensor:
    scaled = logits / _column([spec.params.temperature for spec in specs], logits)
    kept = _truncate(scaled, specs)
    return (kept.double() + gumbel_noise(specs, logits.shape[-1], logits.device)).argmax(dim=-1)


def _truncate(logits: torch.Tensor, specs: Sequence[SampleSpec]) -> torch.Tensor:
    """Set to -inf what top-k, top-p and min-p leave out; none of them leaves out the likeliest. Equal logits are kept or dropped in order of token id."""
    if all(spec.params.top_k is None and spec.params.top_p >= 1 and spec.params.min_p <= 0 for spec in specs):
        return logits
    vocab_size = logits.shape[-1]
    ordered, token_ids = logits.sort(dim=-1, descending=True, stable=True)
    ranks = torch.arange(vocab_size, device=logits.device)
    ordered = ordered.masked_fill(ranks >= _column([spec.params.top_k or vocab_size for spec in specs], logits), _NEVER)
    probabilities = ordered.softmax(dim=-1)
    before = probabilities.cumsum(dim=-1) - probabilities
    dropped = before >= _column([spec.params.top_p for spec in specs], logits)
    dropped |= probabilities < probabilities[:, :1] * _column([spec.params.min_p for spec in specs], logits)
    return torch.empty_like(logits).scatter_(1, token_ids, ordered.masked_fill(dropped, _NEVER))


def gumbel_noise(specs: Sequence[SampleSpec], vocab_size: int, device: torch.device) -> torch.Tensor:
    """Standard Gumbel noise keyed by (seed, position, token).  # [rows, vocab] in fp64"""
    keys = torch.tensor([_signed(_row_key(spec)) for spec in specs], dtype=torch.int64, device=device)
    tokens = torch.arange(1, vocab_size + 1, dtype=torch.int64, device=device)
    bits = _mix(keys[:, None] + tokens * _signed(0x9E3779B97F4A7C15))
    uniform = (((bits >> 11) & ((1 << 53) - 1)).double() + 0.5) / (1 << 53)  # in (0, 1)
    return -torch.log(-torch.log(uniform))


def _row_key(spec: SampleSpec) -> int:
    return _mix_int(_mix_int(spec.seed & _WORD) ^ (spec.position * 0xD1342543DE82EF95 & _WORD))


def _mix(x: torch.Tensor) -> torch.Tensor:
    """The finaliser of SplitMix64 (Steele et al. 2014) on int64, whose products wrap."""
    x = (x ^ _shift(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shift(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _shift(x, 31)


def _mix_int(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & _WORD
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _WORD
    return x ^ (x >> 31)


def _shift(x: torch.Tensor, bits: int) -> torch.Tensor:
    """A logical shift to the right; int64's own keeps the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word


def _column(values: Sequence[float], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(values, device=like.device)[:, None]
