"""Tests of whole engines whose row operations are interpreted kernels, against transformers and the torch engine."""

from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from graftwork.platform.ids import RequestId
from tests.engine.families import ADAPTER, FAMILIES, LATER_FAMILIES, Family, make_family
from tests.engine.runner.test_decoder_parity import random_prompt
from tests.engine.runner.test_model_families import check_rows, recorded

pytestmark = [
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),
    pytest.mark.usefixtures("engine_interprets_rows"),
]

Requests = tuple[tuple[int, str | None], ...]


def run(family: Family, row_kernels: str, requests: Requests, max_tokens: int) -> list[list[int]]:
    """The greedy tokens of prompts of these lengths and adapters, after each row was checked against transformers."""
    driver = family.engine(row_kernels=row_kernels, max_batch_tokens=8)
    driver.warm(ADAPTER)
    recorder, asked = recorded(driver), dict[RequestId, Any]()
    outcomes = []
    for seed, (length, adapter) in enumerate(requests):
        prompt, domain = random_prompt(Random(seed), length), bytes([seed])
        outcomes.append(driver.submit(prompt, adapter=adapter, domain=domain, max_tokens=max_tokens, ignore_eos=True))
        asked[list(driver.outcomes)[-1]] = (prompt, adapter)
    driver.finish()
    check_rows(recorder, driver, family, asked)
    return [outcome.token_ids for outcome in outcomes]


def check(folder: Path, name: str, requests: Requests, max_tokens: int) -> None:
    torch.set_num_threads(1)
    family = make_family(FAMILIES[name], folder)

    tokens = run(family, "triton", requests, max_tokens)

    assert tokens == run(family, "torch", requests, max_tokens)
    assert {len(own) for own in tokens} == {max_tokens}


def test_an_engine_with_row_kernels_gives_the_same_tokens(tmp_path: Path) -> None:
    """In fp32 the kernels give the logits of transformers and peft in a prompt, a chunk and a decoding row, and torch's
    tokens, with norms of heads and windows."""
    check(tmp_path, "qwen3-windows", ((7, ADAPTER), (2, None)), 2)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama-llama3", "qwen3-windows", "llama-biased", "mistral", *LATER_FAMILIES])
def test_all_families_have_the_same_tokens(tmp_path: Path, name: str) -> None:
    """So they do over more steps with rope scaling, with biases and an uneven head size, and with wide heads."""
    # Up to 3 tokens, transformers has other angles for this family; an engine cannot change those of cached tokens.
    shortest = 4 if name == "phi4-long" else 1
    check(tmp_path, name, ((9, None), (5, ADAPTER), (shortest, None), (14, ADAPTER)), 6)
