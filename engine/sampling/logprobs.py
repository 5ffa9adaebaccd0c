"""Log probabilities of the chosen tokens, by the model's own distribution.

Owns a copy of the log probabilities of the rows that asked for them, taken before the logits are changed.
Rows that did not ask cost nothing.
"""

from collections.abc import Sequence

import torch

from graftwork.engine.core.events import TokenLogprobs
from graftwork.engine.core.sampling import MAX_TOP_LOGPROBS
from graftwork.engine.core.step import SampleSpec


class StepLogprobs:
    """The log probabilities of the rows of one step."""

    def __init__(self, logits: torch.Tensor, specs: Sequence[SampleSpec]) -> None:
        """logits: [rows, vocab] in fp32, as the model returned them. They may be changed afterwards."""
        self._wanted = [spec.params.logprobs for spec in specs]
        self._rows = [row for row, wanted in enumerate(self._wanted) if wanted is not None]
        if self._rows:
            self._logprobs = logits[self._rows].log_softmax(dim=-1)  # [num_wanted, vocab]

    def of(self, token_ids: Sequence[int]) -> list[TokenLogprobs | None]:
        """One for each row; None for rows that did not ask."""
        found: list[TokenLogprobs | None] = [None] * len(self._wanted)
        if not self._rows:
            return found
        chosen = torch.tensor([token_ids[row] for row in self._rows], device=self._logprobs.device)[:, None]
        logprobs = self._logprobs.gather(1, chosen).squeeze(1).tolist()
        for row, logprob, top in zip(self._rows, logprobs, self._likeliest(), strict=True):
            found[row] = TokenLogprobs(logprob, tuple(top[: self._wanted[row]]))
        return found

    def _likeliest(self) -> list[list[tuple[int, float]]]:
        """The same number for every row, so that ties do not depend on what other rows ask for."""
        if not any(self._wanted):
            return [[] for _ in self._rows]
        width = min(MAX_TOP_LOGPROBS, self._logprobs.shape[-1])
        token_ids = self._logprobs.topk(width, dim=-1).indices.sort(dim=-1).values
        ordered, order = self._logprobs.gather(1, token_ids).sort(dim=-1, descending=True, stable=True)
        rows = zip(token_ids.gather(1, order).tolist(), ordered.tolist(), strict=True)
        return [list(zip(*row, strict=True)) for row in rows]
