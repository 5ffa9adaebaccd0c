"""Architectures with recurrent layers against transformers and peft, with small random models, row by row."""

from collections.abc import Callable
from functools import cache
from random import Random
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from graftwork.platform.ids import RequestId
from tests.engine.families import Family, make_family
from tests.engine.hybrid_families import HYBRID_FAMILIES, HYBRID_KINDS
from tests.engine.runner.test_decoder_parity import random_prompt
from tests.engine.runner.test_model_families import check_rows, recorded

FamilyOf = Callable[[str], Family]


@pytest.fixture(scope="session")
def family_of(tmp_path_factory: pytest.TempPathFactory) -> FamilyOf:
    """Returns a function that makes each family on first use, with all its adapters."""
    torch.set_num_threads(1)

    def make(name: str) -> Family:
        kinds = HYBRID_KINDS.get(name, {})
        return make_family(HYBRID_FAMILIES[name], tmp_path_factory.mktemp(name), tuple(kinds), kinds)

    return cache(make)


@pytest.mark.parametrize("max_batch_tokens", [256, 7, 1], ids=["whole", "chunked", "single"])
@pytest.mark.parametrize("name", HYBRID_FAMILIES)
def test_logits_equal_those_of_transformers(family_of: FamilyOf, name: str, max_batch_tokens: int) -> None:
    """Rows of the base equal transformers in prefill, in chunks of several sizes, in decode, and with a cached prefix."""
    family = family_of(name)
    driver = family.engine(max_batch_tokens=max_batch_tokens, max_running=4)
    recorder = recorded(driver)
    prompts = [random_prompt(Random(length), length) for length in (19, 4, 23)]

    for prompt in prompts:
        driver.submit(prompt, max_tokens=5, ignore_eos=True)
    driver.finish()
    driver.run(prompts[2], max_tokens=2, ignore_eos=True)

    asked: dict[RequestId, Any] = {
        request: (prompt, None) for request, prompt in zip(driver.outcomes, [*prompts, prompts[2]], strict=True)
    }
    assert len(recorder.rows) == 3 * 5 + 2
    check_rows(recorder, driver, family, asked)
    warm = list(driver.outcomes.values())[-1].cache
    assert warm is not None
    assert warm.cached_tokens == 20


@pytest.mark.parametrize("name", HYBRID_KINDS)
def test_adapters_of_every_kind_equal_peft(family_of: FamilyOf, name: str) -> None:
    """In one batch, rows of each adapter have peft's logits in prefill, chunks and decode: LoRA, rsLoRA, DoRA and biases on
    the projections of recurrent layers, on joined ones of the MLP, on experts, embedding and head."""
    family, kinds = family_of(name), HYBRID_KINDS[name]
    driver = family.engine(max_batch_tokens=40, max_running=len(kinds) + 1)
    driver.warm(*kinds)
    recorder, asked = recorded(driver), dict[RequestId, Any]()
    uses = [None, *kinds]

    for number, adapter in enumerate(uses):
        prompt = random_prompt(Random(number), 5 + 4 * number)
        driver.submit(prompt, adapter=adapter, max_tokens=3, ignore_eos=True)
        asked[list(driver.outcomes)[-1]] = (prompt, adapter)
    driver.finish()

    assert len(recorder.rows) == 3 * len(uses)
    check_rows(recorder, driver, family, asked)


def rows_of(family: Family, prompt: list[int], adapter: str | None, crowd: int, **options: Any) -> list[torch.Tensor]:
    """The logits of the rows of one request in a batch with some others, which begin before it and beside it."""
    driver = family.engine(max_running=8, **options)
    driver.warm(adapter)
    recorder = recorded(driver)
    for number in range(crowd):
        neighbour = random_prompt(Random(number), 3 + 7 * number)
        driver.submit(neighbour, adapter=[None, adapter][number % 2], max_tokens=6, ignore_eos=True)
    driver.submit(prompt, adapter=adapter, max_tokens=6, ignore_eos=True)
    subject = list(driver.outcomes)[-1]
    driver.finish()
    return [logits for piece, logits in recorder.rows if piece.request_id == subject]


@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, "float32") for name in HYBRID_KINDS), ("granite-hybrid", "bfloat16")]
)
def test_neighbours_do_not_change_a_bit(family_of: FamilyOf, name: str, dtype: str) -> None:
    """A row has the same bits alone and in a batch, in prefill and decode."""
    family, prompt, adapter = family_of(name), random_prompt(Random(5), 17), next(iter(HYBRID_KINDS[name]))

    alone, crowded = (rows_of(family, prompt, adapter, crowd, dtype=dtype) for crowd in (0, 5))

    assert len(alone) == 6
    assert all(torch.equal(one, other) for one, other in zip(alone, crowded, strict=True))


@pytest.mark.parametrize("name", ["granite-hybrid-experts"])
def test_bf16_logits_are_as_near_to_the_truth_as_those_of_transformers(family_of: FamilyOf, name: str) -> None:
    """The median error against fp32 arithmetic on the same bf16 weights is at most that of transformers."""
    family = family_of(name)
    theirs = AutoModelForCausalLM.from_pretrained(family.folder, dtype=torch.bfloat16).train(False)
    oracle: torch.nn.Module = AutoModelForCausalLM.from_pretrained(family.folder, dtype=torch.bfloat16).train(False)
    oracle.float()
    our_errors, their_errors = list[float](), list[float]()

    for seed in range(3):
        tokens = random_prompt(Random(seed), 40)
        driver = family.engine(dtype="bfloat16")
        recorder = recorded(driver)
        for length in range(1, 41):
            driver.submit(tokens[:length], domain=bytes([length]), max_tokens=1)
        driver.finish()
        with torch.inference_mode():
            truth = oracle(torch.tensor([tokens])).logits[0]  # [40, vocab]
            errors = (theirs(torch.tensor([tokens])).logits[0].float() - truth).abs().amax(dim=1)
        their_errors += errors.tolist()
        our_errors += [(logits - truth[piece.end - 1]).abs().max().item() for piece, logits in recorder.rows]

    assert 0 < torch.tensor(our_errors).median() <= 1.1 * torch.tensor(their_errors).median()
