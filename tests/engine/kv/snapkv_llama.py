"""SnapKV over a Llama of transformers, by masks: the reference of budgets of KV.

The prompt is computed with eager attention, whose weights transformers gives out. From these, each KV head of each layer
chooses what it keeps. The text is then computed again from its start, and tokens behind the prompt do not see what is not
kept. Nothing is copied or thrown away, and no code is shared with the engine.
"""

from collections.abc import Sequence
from typing import Any

import torch

OBSERVED, SINKS, AROUND = 32, 4, 3


class SnapKvLlama:
    """One model whose prompts are reduced to the `budget` tokens that matter most to their end, in pages of `page_tokens`."""

    def __init__(self, model: Any, budget: int, page_tokens: int) -> None:
        self.model, self.budget, self.page_tokens = model, budget, page_tokens
        model.set_attn_implementation("eager")
        self._chosen: dict[tuple[int, ...], list[list[set[int]]]] = {}
        self.attentions = [one for one in model.modules() if type(one).__name__ == "LlamaAttention"]

    @torch.inference_mode()
    def logits(self, prompt: Sequence[int], answer: Sequence[int]) -> torch.Tensor:
        """The logits after the prompt's last token and after each token of the answer: [1 + answer, vocab]."""
        if (key := tuple(prompt)) not in self._chosen:
            self._chosen[key] = self._kept(prompt)
        masks = [self._mask(seen, len(answer)) for seen in self._chosen[key]]
        hooks = [
            attention.register_forward_pre_hook(_masked(mask), with_kwargs=True)
            for attention, mask in zip(self.attentions, masks, strict=True)
        ]
        try:
            logits: torch.Tensor = self.model(torch.tensor([[*prompt, *answer]])).logits[0]
        finally:
            for hook in hooks:
                hook.remove()
        return logits[len(prompt) - 1 :]

    def answer(self, prompt: Sequence[int], count: int) -> list[int]:
        """The greedy answer."""
        found: list[int] = []
        while len(found) < count:
            found.append(int(self.logits(prompt, found)[-1].argmax()))
        return found

    def num_kept(self, num_prompt: int) -> int:
        """The tokens that are kept: the budget, and what makes the rest whole pages."""
        kept = max(self.budget, 0)
        while (num_prompt - kept) % self.page_tokens:
            kept += 1
        return min(kept, num_prompt)

    def _kept(self, prompt: Sequence[int]) -> list[list[set[int]]]:
        """What each head of each layer keeps."""
        weights = self.model(torch.tensor([list(prompt)]), output_attentions=True).attentions
        return [
            [self._choice(one, len(prompt)) for one in layer[0].unflatten(0, (self._kv_heads(), -1))]
            for layer in weights
        ]

    def _choice(self, weights: torch.Tensor, num_prompt: int) -> set[int]:
        """What one KV head keeps, from the weights of its query heads: [group, prompt, prompt]."""
        end = num_prompt - OBSERVED
        scores = weights[:, end:, :end].sum(dim=(0, 1)).tolist()
        pooled = [max(scores[max(place - AROUND, 0) : place + AROUND + 1]) for place in range(end)]
        middle = sorted(range(SINKS, end), key=lambda place: (-pooled[place], place))
        always = {*range(min(SINKS, num_prompt)), *range(max(end, 0), num_prompt)}
        return always | set(middle[: self.num_kept(num_prompt) - len(always)])

    def _mask(self, kept: list[set[int]], num_answer: int) -> torch.Tensor:
        """What queries of one layer see: fp32 [1, heads, text, text], 0 or minus infinity."""
        num_prompt = 1 + max(max(one) for one in kept)
        size = num_prompt + num_answer
        sees = torch.ones(size, size).tril().bool().repeat(len(kept), 1, 1)
        for head, one in enumerate(kept):
            gone = [place for place in range(num_prompt) if place not in one]
            sees[head, num_prompt:, gone] = False
        per_head = sees.repeat_interleave(self.model.config.num_attention_heads // len(kept), dim=0)
        return torch.zeros(1, *per_head.shape).masked_fill(~per_head, -torch.inf)

    def _kv_heads(self) -> int:
        heads: int = self.model.config.num_key_value_heads
        return heads


def _masked(mask: torch.Tensor) -> Any:
    def hook(_: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        return args, kwargs | {"attention_mask": mask}

    return hook
