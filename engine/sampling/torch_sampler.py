"""Samples in torch: chooses the token of each row, the likeliest or one drawn at random, and reports its log probability.

A row is the logits of one position of one request. Owns the order and arithmetic of the choice: banned tokens, logit
biases, penalties, temperature, top-k, top-p, min-p, then one random number that picks a token. Each of these operations
runs once for all rows that need it, and changes no other row.

Log probabilities are those of the model's own distribution: they are computed before the logits are changed, and only
for rows whose request asked for them.

Invariant: a row's token depends only on this row's logits and spec, never on other rows or on their order.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import torch
from torch.nn import functional

from graftwork.engine.core.events import TokenLogprobs
from graftwork.engine.core.prefix_keys import TokenCounts
from graftwork.engine.core.sampling import MAX_TOP_LOGPROBS
from graftwork.engine.core.step import SampleSpec
from graftwork.engine.grammar.matching.masks import FilledMasks, MaskFiller
from graftwork.engine.sampling.rng import uniform
from graftwork.engine.sampling.sampler import AwaitedTokens, SampledRows
from graftwork.engine.sampling.top_k_top_p import first_width, keep_likeliest, truncates, wider
from graftwork.platform.errors import GraftworkError

_NEVER = float("-inf")


class TorchSampler:
    """The sampler in torch, for any device. It waits for the device in each step."""

    takes_awaited_tokens = False

    def __init__(self, masks: MaskFiller) -> None:
        self._masks = masks

    def begin(self, specs: Sequence[SampleSpec], awaited: AwaitedTokens | None = None) -> "TorchSampling":
        return TorchSampling(self._masks, self._masks.begin(specs), specs)


@dataclass(frozen=True, slots=True)
class TorchSampling:
    """Samples the tokens of one step. The grammar masks are filled on another thread."""

    masks: MaskFiller
    filling: "Future[FilledMasks] | None"
    specs: Sequence[SampleSpec]

    @property
    def passenger(self) -> None:
        """Nothing travels to the device before the logits are computed."""
        return

    def sample(self, logits: torch.Tensor) -> "TorchSampled":
        logits = logits.float()
        logprobs = StepLogprobs(logits, self.specs)
        ends = self.masks.apply(self.filling, logits)
        return TorchSampled(choose_tokens(logits, self.specs), logprobs, ends)


@dataclass(frozen=True, slots=True)
class TorchSampled:
    """The tokens of one step, and what their log probabilities are computed from."""

    token_ids: torch.Tensor  # [rows] int64
    logprobs: "StepLogprobs"
    ends: Mapping[int, GraftworkError | None]

    def result(self) -> SampledRows:
        token_ids = _as_ints(self.token_ids)
        return SampledRows(token_ids, self.logprobs.of(token_ids), self.ends)


def edit_logits(logits: torch.Tensor, specs: Sequence[SampleSpec]) -> None:
    """Applies banned tokens, logit biases and penalties to the logits, in the same order as vLLM. Changes `logits` in
    place.

    logits: [rows, vocab] in fp32. `specs` has one entry for each row.
    """
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
    """Applies the repetition penalty (Keskar et al. 2019), then presence and frequency penalties as OpenAI defines
    them.
    """
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
    """Returns, for each counted token, its row and its three penalties.  # 4 × [num_seen]"""
    repeats = torch.tensor(sizes, device=device)
    params = [spec.params for _, spec in placed]
    each = (
        torch.tensor([row for row, _ in placed], device=device),
        torch.tensor([one.repetition_penalty for one in params], device=device),
        torch.tensor([one.frequency_penalty for one in params], device=device),
        torch.tensor([one.presence_penalty for one in params], device=device),
    )
    return tuple(column.repeat_interleave(repeats) for column in each)


class StepLogprobs:
    """Computes the log probabilities of the tokens that one step chooses."""

    def __init__(self, logits: torch.Tensor, specs: Sequence[SampleSpec]) -> None:
        """logits: [rows, vocab] in fp32, as the model returned them. The caller may change the logits afterwards."""
        self._wanted = [spec.params.logprobs for spec in specs]
        self._rows = [row for row, wanted in enumerate(self._wanted) if wanted is not None]
        if self._rows:
            self._logprobs = logits[self._rows].log_softmax(dim=-1)  # [num_wanted, vocab]

    def of(self, token_ids: Sequence[int]) -> list[TokenLogprobs | None]:
        """Returns, for each row, the log probability of its chosen token and of its likeliest tokens.

        `token_ids` are the chosen tokens. The result is None for a row whose request did not ask for log probabilities.
        """
        found: list[TokenLogprobs | None] = [None] * len(self._wanted)
        if not self._rows:
            return found
        chosen = torch.tensor([token_ids[row] for row in self._rows], device=self._logprobs.device)[:, None]
        logprobs = self._logprobs.gather(1, chosen).squeeze(1).tolist()
        tops = likeliest(self._logprobs) if any(self._wanted) else [[] for _ in self._rows]
        for row, logprob, top in zip(self._rows, logprobs, tops, strict=True):
            found[row] = TokenLogprobs(logprob, tuple(top[: self._wanted[row]]))
        return found


def likeliest(logprobs: torch.Tensor) -> list[list[tuple[int, float]]]:
    """Returns the `MAX_TOP_LOGPROBS` likeliest tokens of each row, the likeliest first, with their log probabilities.

    The number of tokens is fixed, so that the order of equal values does not depend on what other rows ask for.

    logprobs: [num_rows, vocab].
    """
    width = min(MAX_TOP_LOGPROBS, logprobs.shape[-1])
    token_ids = logprobs.topk(width, dim=-1).indices.sort(dim=-1).values
    ordered, order = logprobs.gather(1, token_ids).sort(dim=-1, descending=True, stable=True)
    rows = zip(token_ids.gather(1, order).tolist(), ordered.tolist(), strict=True)
    return [list(zip(*row, strict=True)) for row in rows]


_BLOCK = 128


_BELOW_ONE = 1 - 2**-53


def choose_tokens(logits: torch.Tensor, specs: Sequence[SampleSpec]) -> torch.Tensor:
    """Chooses one token for each row of logits. Returns the token ids: [rows] int64. Changes `logits` in place.

    logits: [rows, vocab] in fp32. `specs` has one entry for each row.
    """
    edit_logits(logits, specs)
    drawn = [row for row, spec in enumerate(specs) if not spec.params.is_greedy]
    if not drawn:
        return logits.argmax(dim=-1)
    if len(drawn) == len(specs):
        return _draw(logits, specs)
    chosen = logits.argmax(dim=-1)
    chosen[drawn] = _draw(logits[drawn], [specs[row] for row in drawn])
    return chosen


def _draw(logits: torch.Tensor, specs: Sequence[SampleSpec]) -> torch.Tensor:
    """Draws a token for each row.  # [rows]"""
    scaled = logits / torch.tensor([spec.params.temperature for spec in specs], device=logits.device)[:, None]
    uniforms = torch.tensor([uniform(spec) for spec in specs], dtype=torch.float64, device=logits.device)
    cut = [row for row, spec in enumerate(specs) if truncates(spec)]
    if not cut:
        return _draw_of_all(scaled, specs, uniforms)
    if len(cut) == len(specs):
        return _draw_of_likeliest(scaled, specs, uniforms)
    others = [row for row, spec in enumerate(specs) if not truncates(spec)]
    chosen = torch.empty(len(specs), dtype=torch.int64, device=logits.device)
    chosen[cut] = _draw_of_likeliest(scaled[cut], [specs[row] for row in cut], uniforms[cut])
    chosen[others] = _draw_of_all(scaled[others], [specs[row] for row in others], uniforms[others])
    return chosen


def _draw_of_all(scaled: torch.Tensor, specs: Sequence[SampleSpec], uniforms: torch.Tensor) -> torch.Tensor:
    """Draws a token from the whole vocabulary, except the tokens that min-p drops."""
    weights = scaled.softmax(dim=-1)
    if any(spec.params.min_p > 0 for spec in specs):
        least = torch.tensor([spec.params.min_p for spec in specs], device=scaled.device)[:, None]
        weights *= weights >= weights.amax(dim=-1, keepdim=True) * least
    return _pick_in_blocks(weights, uniforms)


def _draw_of_likeliest(scaled: torch.Tensor, specs: Sequence[SampleSpec], uniforms: torch.Tensor) -> torch.Tensor:
    """Draws from the tokens that top-k, top-p and min-p keep. A row that keeps more than the first `width` tokens is
    computed again with a larger width.
    """
    chosen = torch.empty(len(specs), dtype=torch.int64, device=scaled.device)
    rows = torch.arange(len(specs), device=scaled.device)
    width = first_width(specs)
    while len(rows):
        own = specs if len(rows) == len(specs) else [specs[row] for row in rows.tolist()]
        kept = keep_likeliest(scaled[rows], own, width)
        drawn = kept.token_ids.gather(1, _pick(kept.weights.cumsum(dim=-1), uniforms[rows])[:, None])
        chosen[rows] = drawn.squeeze(1)
        rows, width = rows[~kept.is_whole], wider(width)
    return chosen


def _pick_in_blocks(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Picks a token of each row by weight: first a block of the vocabulary, then a token in the block.  # [rows]

    A cumulative sum over the whole vocabulary would take five times as long.
    """
    padded = functional.pad(weights, (0, -weights.shape[-1] % _BLOCK))
    blocks = padded.view(len(weights), -1, _BLOCK)  # [rows, blocks, _BLOCK]
    sums = blocks.sum(dim=-1).double()  # [rows, blocks]
    cumulative = sums.cumsum(dim=-1)
    block = _pick(cumulative, uniforms)[:, None]
    own, upto = sums.gather(1, block), cumulative.gather(1, block)
    rest = (uniforms[:, None] * cumulative[:, -1:] - (upto - own)) / own  # in [0, 1), except for rounding
    within = blocks.take_along_dim(block[:, :, None], dim=1).squeeze(1).double()  # [rows, _BLOCK]
    place = _pick(within.cumsum(dim=-1), rest.squeeze(1).clamp_(0, _BELOW_ONE))
    return (block.squeeze(1) * _BLOCK + place).clamp_(max=weights.shape[-1] - 1)


def _pick(cumulative: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Returns, for each row, the index at which the cumulative weights pass the row's number.  # [rows]

    Never returns an index of weight 0. A row of NaN gets some valid index; its request ends with an error elsewhere.
    """
    aims = uniforms[:, None] * cumulative[:, -1:]
    found = torch.searchsorted(cumulative, aims, right=True).squeeze(1)
    return found.clamp_(max=cumulative.shape[-1] - 1)


def _as_ints(token_ids: torch.Tensor) -> list[int]:
    return [int(token) for token in token_ids.tolist()]
