"""Tests of greedy tokens through the whole server against transformers and peft."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from openai import AsyncOpenAI
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from graftwork.demo.tasks import Case, held_out_cases
from tests.end_to_end.conftest import DEMO, DemoServer

PROMPTS = 50
MAX_TOKENS = 32
TENANT_BY_JOB = {"base": "Plain", "pirate": "Blackbeard", "helpdesk": "Helpdesk", "terse": "Plain"}

Prompts = dict[str, list[list[int]]]


@pytest.fixture(scope="module")
def prompts() -> Prompts:
    """Token ids of held-out cases of each job, rendered by transformers itself."""
    tokenizer: Any = AutoTokenizer.from_pretrained(DEMO / "model")

    def encode(case: Case) -> list[int]:
        ids: list[int] = tokenizer.apply_chat_template(
            case.messages, tools=case.tools or None, add_generation_prompt=True, return_dict=False
        )
        return ids

    return {job: [encode(case) for case in held_out_cases(job, PROMPTS, seed=1)] for job in TENANT_BY_JOB}


def reference(job: str, prompts: list[list[int]]) -> list[list[int]]:
    """Returns the tokens of transformers' generate, with peft, one prompt at a time in fp32."""
    torch.set_num_threads(1)
    model: Any = AutoModelForCausalLM.from_pretrained(DEMO / "model", dtype=torch.float32)
    if job != "base":
        model = PeftModel.from_pretrained(model, str(DEMO / "adapters" / job))
    model = model.train(False)
    answers = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            made = model.generate(
                input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=MAX_TOKENS, do_sample=False
            )
        answers.append([int(token) for token in made[0, len(prompt) :]])
    return answers


async def served(server: DemoServer, prompts: Prompts) -> dict[str, list[list[int]]]:
    """Returns the answers to all prompts of all jobs, sent at once to /v1/completions."""

    async def complete(client: AsyncOpenAI, model: str, prompt: list[int]) -> list[int]:
        answer = await client.completions.create(
            model=model,
            prompt=prompt,
            max_tokens=MAX_TOKENS,
            temperature=0,
            extra_body={"return_token_ids": True},
        )
        tokens: list[int] = answer.choices[0].token_ids  # type: ignore[attr-defined]
        return tokens

    async def complete_all(job: str) -> list[list[int]]:
        async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key=server.key(TENANT_BY_JOB[job])) as client:
            base = (await client.models.list()).data[0].id
            model = base if job == "base" else job
            return list(await asyncio.gather(*(complete(client, model, prompt) for prompt in prompts[job])))

    return dict(zip(prompts, await asyncio.gather(*(complete_all(job) for job in prompts)), strict=True))


def test_every_greedy_token_is_the_one_that_transformers_and_peft_choose(server: DemoServer, prompts: Prompts) -> None:
    """50 prompts of the base and of each of three adapters, all sent at once, get the tokens of generate()."""
    answers = asyncio.run(served(server, prompts))

    for job in prompts:
        for number, (got, expected) in enumerate(zip(answers[job], reference(job, prompts[job]), strict=True)):
            assert got == expected, f"{job} prompt {number}"
    replicas = server.metrics()
    assert replicas["graftwork_running_requests"] == 0


def test_the_adapters_speak_differently() -> None:
    """The three adapters have different weights, and the base model's file is small."""
    digests = {
        (DEMO / "adapters" / job / "adapter_model.safetensors").read_bytes() for job in TENANT_BY_JOB if job != "base"
    }

    assert len(digests) == 3
    assert Path(DEMO / "model" / "model.safetensors").stat().st_size < 12 * 2**20
