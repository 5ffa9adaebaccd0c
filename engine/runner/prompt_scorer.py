"""Computes the log probabilities of a prompt's own tokens, for requests that ask for them.

A step gives the hidden states of the prompt's tokens. Each of them predicts the token after it. The logits of all
tokens together would be [prompt, vocab], which is larger than the KV of the prompt. So logits are computed for at most
`_ROWS_AT_ONCE` tokens at a time, and only the figures that the request asked for are kept.

Owns the size of these blocks, and the figures. Invariant: a block has rows of one request only, and at least as many
rows as `BatchInvariance` asks for, so other requests do not change a bit.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate

import torch
from torch.nn import functional

from graftwork.engine.core.events import TokenLogprobs
from graftwork.engine.core.requests import AdapterUse
from graftwork.engine.core.step import RequestSlice, ScoreSpec
from graftwork.engine.lora.backend import LoraBackend
from graftwork.engine.lora.packs import AdapterMix
from graftwork.engine.lora.segments import Segment
from graftwork.engine.lora.torch_backend import padded_rows
from graftwork.engine.model.batch_invariance import BatchInvariance
from graftwork.engine.runner.decoder import Decoder
from graftwork.engine.sampling.torch_sampler import likeliest
from graftwork.platform.ids import RequestId

_ROWS_AT_ONCE = 64
"""The most rows whose logits are in memory together. For a vocabulary of 150,000 tokens they take 38 MB in fp32."""


Observer = Callable[[int, torch.Tensor], None]
"""Takes a position in the prompt, and the log probabilities of all tokens after it and the next ones: [rows, vocab]."""


class PromptScorer:
    """Turns hidden states into the log probabilities of prompt tokens."""

    def __init__(
        self,
        decoder: Decoder,
        lora: LoraBackend,
        rules: BatchInvariance,
        mix_of: Callable[[Sequence[AdapterUse]], AdapterMix],
    ) -> None:
        """`mix_of` returns the resident adapters that a request uses."""
        self._decoder = decoder
        self._lora = lora
        self._rules = rules
        self._mix_of = mix_of
        self.observer: Observer | None = None
        """Sees the log probabilities of all tokens, of which only some figures are kept."""

    def score(self, slices: Sequence[RequestSlice], hidden: torch.Tensor) -> dict[RequestId, tuple[TokenLogprobs, ...]]:
        """Returns the log probabilities that the slices of a step ask for, by request.

        `hidden` has the rows of the slices, in their order. The LoRA object of the step must not be used any more,
        because this method begins further ones.

        hidden: [num_tokens, hidden].
        """
        starts = accumulate((piece.num_tokens for piece in slices), initial=0)
        return {
            piece.request_id: self._score_slice(
                piece.scores, self._mix_of(piece.adapters), hidden[start + piece.scores.start - piece.start :]
            )
            for piece, start in zip(slices, starts, strict=False)
            if piece.scores is not None
        }

    def _score_slice(self, scores: ScoreSpec, mix: AdapterMix, hidden: torch.Tensor) -> tuple[TokenLogprobs, ...]:
        """Scores the tokens of one slice. The first row of `hidden` predicts the first of them."""
        found: list[TokenLogprobs] = []
        for first in range(0, len(scores.token_ids), _ROWS_AT_ONCE):
            token_ids = scores.token_ids[first : first + _ROWS_AT_ONCE]
            logprobs = self._logprobs(hidden[first : first + len(token_ids)], mix)
            if self.observer is not None:
                self.observer(scores.start + first, logprobs)
            found += _figures(logprobs, token_ids, scores.num_top)
        return tuple(found)

    def _logprobs(self, hidden: torch.Tensor, mix: AdapterMix) -> torch.Tensor:
        """Returns the log probabilities of all tokens after each row: [num_rows, vocab] fp32."""
        num_rows = len(hidden)
        rows = padded_rows(num_rows, self._rules, with_adapters=mix.changes_vocabulary)
        padded = functional.pad(hidden, (0, 0, 0, rows - num_rows))
        lora = None
        if mix.changes_vocabulary:
            lora = self._lora.step([Segment(0, num_rows, mix, 0, num_rows, tuple(range(num_rows)))], rows)
        return self._decoder.logits(padded, lora)[:num_rows].float().log_softmax(dim=-1)


def _figures(logprobs: torch.Tensor, token_ids: Sequence[int], num_top: int) -> list[TokenLogprobs]:
    """Returns the figures of one token in each row.

    logprobs: [num_rows, vocab].
    """
    tokens = torch.tensor(token_ids, device=logprobs.device)[:, None]  # [num_rows, 1]
    own = logprobs.gather(1, tokens)  # [num_rows, 1]
    before = torch.arange(logprobs.shape[-1], device=logprobs.device) < tokens  # tokens with a lower id
    ranks = 1 + (logprobs > own).sum(dim=-1) + ((logprobs == own) & before).sum(dim=-1)
    tops = likeliest(logprobs) if num_top else [[]] * len(token_ids)
    return [
        TokenLogprobs(logprob, tuple(top[:num_top]), rank)
        for logprob, top, rank in zip(own.squeeze(1).tolist(), tops, ranks.tolist(), strict=True)
    ]
