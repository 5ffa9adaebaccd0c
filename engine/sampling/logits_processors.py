"""Changes logits before a token is chosen, as each request asks: banned tokens, biases, penalties.

Owns the order and arithmetic of these changes. Each is one operation over all rows that need it, and only at the
tokens that it concerns; other rows are not touched.
Invariant: each logit is written once per change, so the order of rows does not matter.
"""

from collections.abc import Sequence

import torch

from graftwork.engine.core.step import SampleSpec
from graftwork.engine.core.token_counts import TokenCounts

_NEVER = float("-inf")


def edit_logits(logits: torch.Tensor, specs: Sequence[SampleSpec]) -> None:
    """Changes logits in place, in vLLM's order: bans and biases, then penalties. logits: [rows, vocab] in fp32."""
    _ban(logits, [(row, spec) for row, spec in enumerate(specs) if spec.banned_token_ids])
    _add_bias(logits, [(row, spec) for row, spec in enumerate(specs) if spec.params.logit_bias])
    _penalise(logits, [(row, spec) for row, spec in enumerate(specs) if spec.history is not None])


def _ban(logits: torch.Tensor, placed: list[tuple[int, SampleSpec]]) -> None:
    if placed:
        rows = [row for row, spec in placed for _ in spec.banned_token_ids]
        tokens = [token for _, spec in placed for token in spec.banned_token_ids]
        logits[rows, tokens] = _NEVER


def _add_bias(logits: torch.Tensor, placed: list[tuple[int, SampleSpec]]) -> None:
    if placed:
        rows = [row for row, spec in placed for _ in spec.params.logit_bias]
        pairs = [pair for _, spec in placed for pair in spec.params.logit_bias]
        logits[rows, [token for token, _ in pairs]] += torch.tensor([bias for _, bias in pairs], device=logits.device)


def _penalise(logits: torch.Tensor, placed: list[tuple[int, SampleSpec]]) -> None:
    """Repetition first (Keskar et al. 2019), then presence and frequency as OpenAI defines them."""
    seen = TokenCounts()
    sizes = [spec.history.copy_to(seen, spec.draft_token_ids) for _, spec in placed if spec.history is not None]
    if not seen:
        return
    places = torch.frombuffer(seen.token_ids, dtype=torch.int64).to(logits.device)  # [num_seen]
    counts = torch.frombuffer(seen.counts, dtype=torch.int64).to(logits.device)  # [num_seen]
    rows, repetition, frequency, presence = _columns(placed, sizes, logits.device)
    places = places + rows * logits.shape[-1]
    found = logits.view(-1).index_select(0, places)  # [num_seen]
    found = torch.where(found > 0, found / repetition, found * repetition)
    found -= counts * frequency + (counts > 0) * presence
    logits.view(-1).index_copy_(0, places, found)


def _columns(placed: list[tuple[int, SampleSpec]], sizes: list[int], device: torch.device) -> tuple[torch.Tensor, ...]:
    """The row and the penalties of each counted token.  # 4 × [num_seen]"""
    repeats = torch.tensor(sizes, device=device)
    params = [spec.params for _, spec in placed]
    each = (
        torch.tensor([row for row, _ in placed], device=device),
        torch.tensor([one.repetition_penalty for one in params], device=device),
        torch.tensor([one.frequency_penalty for one in params], device=device),
        torch.tensor([one.presence_penalty for one in params], device=device),
    )
    return tuple(column.repeat_interleave(repeats) for column in each)
