"""Greedy answers of a model to cases, in batches, for evaluation."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from peft import PeftModel
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from graftwork.demo.tasks import Case

MAX_NEW_TOKENS = 112
BATCH_TOKENS = 16_000


@dataclass(frozen=True, slots=True)
class Attempt:
    """What a model said to one case, and after how many tokens."""

    case: Case
    said: str
    prompt_tokens: int

    @property
    def is_exact(self) -> bool:
        return self.said == self.case.expected


def attempts(
    model: LlamaForCausalLM | PeftModel, tokenizer: PreTrainedTokenizerFast, cases: list[Case]
) -> list[Attempt]:
    """One attempt for every case, in another order."""
    prompts = [prompt_of(tokenizer, case) for case in cases]
    order = sorted(range(len(cases)), key=lambda index: len(prompts[index]))
    found: list[Attempt] = []
    for indices in grouped(order, [len(prompt) for prompt in prompts]):
        said = generate(model, tokenizer, [prompts[index] for index in indices])
        found += [Attempt(cases[index], text, len(prompts[index])) for index, text in zip(indices, said, strict=True)]
    return found


def prompt_of(tokenizer: PreTrainedTokenizerFast, case: Case) -> list[int]:
    text = tokenizer.apply_chat_template(
        case.messages, tools=list(case.tools) or None, add_generation_prompt=True, tokenize=False
    )
    token_ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return token_ids


def grouped(order: list[int], lengths: list[int]) -> Iterator[list[int]]:
    """Runs of `order` whose padded size stays under `BATCH_TOKENS`; lengths rise along `order`."""
    group: list[int] = []
    for index in order:
        if group and (len(group) + 1) * (lengths[index] + MAX_NEW_TOKENS) > BATCH_TOKENS:
            yield group
            group = []
        group.append(index)
    if group:
        yield group


@torch.inference_mode()
def generate(
    model: LlamaForCausalLM | PeftModel, tokenizer: PreTrainedTokenizerFast, prompts: list[list[int]]
) -> list[str]:
    """Greedy text for every prompt; prompts are padded on the left."""
    inputs = tokenizer.pad({"input_ids": prompts}, padding_side="left", return_tensors="pt")
    output = cast(Any, model).generate(**inputs, max_new_tokens=MAX_NEW_TOKENS, do_sample=False, num_beams=1)
    texts = tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return [str(text) for text in texts]
