"""transformers and peft in fp32, as the judge of what the engines answer.

An engine's tokens are judged one by one, each behind the engine's own earlier ones: greedy sequences drift apart for
ever after one near tie, so that comparing whole sequences would say little of engines that round differently.
Where every token is the oracle's own choice, the sequence is the oracle's greedy one.
"""

from dataclasses import dataclass

import torch
from peers.protocol import Task
from peft import PeftModel
from transformers import AutoModelForCausalLM
from transformers.utils import logging
from yardstick_model import YardstickModel

TIE = 1e-3
"""Of a logit: an fp32 engine may choose either of two tokens that are nearer than this."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """How an engine's tokens stand to the oracle's."""

    agreement: float
    """Share of tokens that the oracle would have chosen at their place, in [0, 1]."""
    worst: float
    """The most by which the oracle's logit of its own choice exceeds that of the engine's."""


class Oracle:
    """The base and all adapters, in fp32."""

    def __init__(self, model: YardstickModel) -> None:
        logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        under = AutoModelForCausalLM.from_pretrained(model.base, dtype=torch.float32)
        first, *others = model.adapters
        self._model = PeftModel.from_pretrained(under, first, adapter_name="0")
        for index, folder in enumerate(others, start=1):
            self._model.load_adapter(folder, adapter_name=str(index))
        self._model.eval()

    def judge(self, task: Task, token_ids: list[list[int]]) -> Verdict:
        """Raises ValueError if a row has not the tokens that were asked for."""
        for row in token_ids:
            if len(row) != task.output_tokens:
                raise ValueError(f"{len(row)} tokens came where {task.output_tokens} were asked for.")
        regrets = torch.cat([self._regrets(task, token_ids, adapter) for adapter in set(task.adapters)])
        return Verdict(agreement=float((regrets <= 0).double().mean()), worst=float(regrets.max()))

    @torch.inference_mode()
    def _regrets(self, task: Task, token_ids: list[list[int]], adapter: int | None) -> torch.Tensor:
        """Of the rows of one adapter.  # [rows, output_tokens]"""
        rows = [row for row, other in enumerate(task.adapters) if other == adapter]
        inputs = torch.tensor([task.prompts[row] + token_ids[row] for row in rows])  # [rows, prompt + output]
        if adapter is None:
            with self._model.disable_adapter():
                logits = self._model(inputs, logits_to_keep=task.output_tokens + 1).logits
        else:
            self._model.set_adapter(str(adapter))
            logits = self._model(inputs, logits_to_keep=task.output_tokens + 1).logits
        logits = logits[:, :-1]  # [rows, output_tokens, vocab]
        chosen = inputs[:, -task.output_tokens :, None]  # [rows, output_tokens, 1]
        regrets: torch.Tensor = logits.amax(dim=2) - logits.gather(2, chosen).squeeze(2)
        return regrets
