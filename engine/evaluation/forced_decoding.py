"""Decodes texts that are known: each step gives the text's own next token, and hands out what the model expected.

For what acts on decoding alone, such as a budget of KV: the log-probabilities of a prompt would not show it. Owns nothing
between two texts.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from graftwork.engine.core.step import StepPlan, StepResult
from graftwork.engine.runner.model_runner import ModelRunner

PROMPT_SHARE = 0.75
"""The part of a text that is its prompt. The rest is decoded."""


def prompt_tokens(num_tokens: int) -> int:
    """Returns how many of a text's tokens are its prompt."""
    return int(PROMPT_SHARE * num_tokens)


class ForcedRunner:
    """A runner for one request at a time without drafts, which chooses the tokens of a text."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self.text: Sequence[int] = ()
        self.take: Callable[[int, torch.Tensor], None] = lambda position, rows: None
        """Takes the position of a token, and the log-probabilities of the one after it: fp32 [1, vocab] on the CPU."""

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> "_ForcedFlight":
        logits = self.runner.logits(self.runner.batch(plan))  # [sampled rows, vocab]
        chosen = {}
        for piece in plan.slices:
            if piece.samples:
                chosen[piece.request_id] = (int(self.text[piece.end]),)
                self.take(piece.end - 1, logits[:1].log_softmax(-1).float().cpu())
        return _ForcedFlight(StepResult(chosen))

    def recover(self) -> None:
        self.runner.recover()


@dataclass(frozen=True, slots=True)
class _ForcedFlight:
    """A step that has ended."""

    found: StepResult

    def sample(self) -> None:
        """Does nothing, because the tokens are known."""

    def result(self) -> StepResult:
        return self.found
