"""How likely the model itself found what was chosen: logprobs of the raw distribution.

Taken before anything changes the logits, and read once the tokens are known. Rows that want none cost nothing.
"""

from collections.abc import Sequence

import torch

from graftwork.engine.core.events import TokenLogprobs
from graftwork.engine.core.sampling import MAX_TOP_LOGPROBS
from graftwork.engine.core.step import SampleSpec


class StepLogprobs:
    """The log probabilities of one step's rows."""

    def __init__(self, logits: torch.Tensor, specs: Sequence[SampleSpec]) -> None:
        """logits: [rows, vocab] in fp32, as the model made them; they may be changed afterwards."""
        self._wanted = [spec.params.logprobs for spec in specs]
        self._rows = [row for row, wanted in enumerate(self._wanted) if wanted is not None]
        if self._rows:
            self._scores = logits[self._rows].log_softmax(dim=-1)  # [num_wanted, vocab]

    def of(self, token_ids: Sequence[int]) -> list[TokenLogprobs | None]:
        """One for each row; None where none are wanted."""
        found: list[TokenLogprobs | None] = [None] * len(self._wanted)
        if not self._rows:
            return found
        chosen = torch.tensor([token_ids[row] for row in self._rows], device=self._scores.device)[:, None]
        logprobs = self._scores.gather(1, chosen).squeeze(1).tolist()
        for row, logprob, top in zip(self._rows, logprobs, self._likeliest(), strict=True):
            found[row] = TokenLogprobs(logprob, tuple(top[: self._wanted[row]]))
        return found

    def _likeliest(self) -> list[list[tuple[int, float]]]:
        """The same number for every row, so that among equals none depends on what its neighbours want."""
        if not any(self._wanted):
            return [[] for _ in self._rows]
        width = min(MAX_TOP_LOGPROBS, self._scores.shape[-1])
        token_ids = self._scores.topk(width, dim=-1).indices.sort(dim=-1).values
        ordered, order = self._scores.gather(1, token_ids).sort(dim=-1, descending=True, stable=True)
        rows = zip(token_ids.gather(1, order).tolist(), ordered.tolist(), strict=True)
        return [list(zip(*row, strict=True)) for row in rows]
