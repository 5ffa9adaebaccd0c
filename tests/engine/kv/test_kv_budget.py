"""Requests with a budget of KV keep of a prompt what its end attends to, against SnapKV over transformers."""

from collections.abc import Callable
from dataclasses import replace
from itertools import count
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from graftwork.engine.build.limits import scheduler_limits
from graftwork.engine.core.config import EngineConfig
from graftwork.engine.core.requests import ServiceTier, SessionKey, SessionUse
from graftwork.engine.kv.index.kv_budget import OBSERVED_QUERIES, PromptEviction
from graftwork.engine.model.config import read_model_config
from graftwork.platform.errors import InvalidRequest
from tests.engine.conftest import RandomModels
from tests.engine.engine_driver import EngineDriver, Outcome
from tests.engine.kv.snapkv_llama import SnapKvLlama
from tests.engine.random_models import reference_model
from tests.engine.speculative.test_equal_tokens import open_engine

PAGE, BUDGET = 4, 64
SIZES: dict[str, Any] = {"kernels": "torch", "max_running": 4, "max_batch_tokens": 40}
SIZES |= {"device_bytes": 2**17, "host_kv_bytes": 2**17}
Make = Callable[..., EngineDriver]


def prompt_of(seed: int, length: int) -> list[int]:
    random = Random(seed)
    return [random.randrange(2, 97) for _ in range(length)]


@pytest.fixture(scope="module")
def reference(models: RandomModels) -> SnapKvLlama:
    return SnapKvLlama(reference_model(models.base, None), BUDGET, PAGE)


def run(driver: EngineDriver, prompt: list[int], max_tokens: int, **options: Any) -> Outcome:
    """Runs one request alone. Pages that nobody holds are filled with NaN, so none of them is read."""
    found = driver.submit(prompt, max_tokens=max_tokens, ignore_eos=True, kv_budget=BUDGET, **options)
    for number in count():
        if found.is_over:
            break
        if number % 4 == 0:
            driver.poison_unused_pages()
        driver.engine.scheduler.check_integrity()
        driver.step()
    assert found.error is None
    return found


@given(
    num_prompt=st.integers(1, 5000),
    budget=st.integers(64, 4000),
    page_tokens=st.integers(1, 40),
    rooms=st.lists(st.integers(1, 300), min_size=40, max_size=40),
)
def test_a_prompt_ends_in_a_chunk_that_has_all_observed_queries(
    num_prompt: int, budget: int, page_tokens: int, rooms: list[int]
) -> None:
    """However steps divide a prompt, no chunk begins among the observed queries or goes past its end, and what is kept is at
    least the budget and less than a page above it."""
    eviction = PromptEviction.of(num_prompt, budget, page_tokens)
    if eviction is None:
        assert num_prompt - budget < page_tokens
        return
    start, known = 0, num_prompt + 7
    for room in [*rooms, *[300] * 20]:
        taken = eviction.chunk(start, min(room, known - start), room)
        assert 0 <= taken <= max(room, min(known - start, room))
        assert not num_prompt - OBSERVED_QUERIES < start < num_prompt
        assert start >= num_prompt or start + taken <= num_prompt
        start += taken
    assert start == known
    assert budget <= eviction.num_kept < budget + page_tokens
    assert (num_prompt - eviction.num_kept) % page_tokens == 0


@pytest.mark.parametrize("length", [65, 68, 90, 131, 180])
@pytest.mark.parametrize("max_batch_tokens", [40, 256], ids=["chunks", "whole"])
def test_logits_are_those_of_the_masked_reference(
    reference: SnapKvLlama, make_engine: Make, length: int, max_batch_tokens: int
) -> None:
    """Of a prompt in chunks or whole, and of the answer behind it, with what each head of each layer keeps."""
    driver = make_engine(**SIZES | {"max_batch_tokens": max_batch_tokens}, max_draft_tokens=0)
    prompt = prompt_of(length, length)

    found = run(driver, prompt, 12, logprobs=0)

    expected = reference.logits(prompt, found.token_ids)[:-1].log_softmax(-1)
    assert found.token_ids == expected.argmax(-1).tolist()
    own = torch.tensor([one.logprob for one in found.logprobs])
    assert torch.allclose(own, expected.amax(-1), atol=2e-4)
    exact = driver.run(prompt, max_tokens=12, ignore_eos=True, logprobs=0)
    same = all(
        one.logprob == pytest.approx(other.logprob, abs=1e-6)
        for one, other in zip(found.logprobs, exact.logprobs, strict=True)
    )
    assert same == (reference.num_kept(length) == length)


def test_memory_of_the_rest_is_given_back_and_exact_pages_are_found_again(
    reference: SnapKvLlama, make_engine: Make
) -> None:
    """While it decodes, a request holds the pages of its budget; its prompt stays in the cache, as exact KV, and its answer
    does not."""
    driver = make_engine(**SIZES)
    prompt, pool = prompt_of(1, 150), driver.engine.kv_cache.page_store.device
    found = driver.submit(prompt, max_tokens=30, ignore_eos=True, kv_budget=BUDGET)
    held = []
    while not found.is_over:
        driver.step()
        if found.token_ids and not found.is_over:
            held.append((len(found.token_ids), pool.active_pages))
    kept = reference.num_kept(150)
    assert held
    assert all(-(-(kept + count - 1) // PAGE) <= pages <= -(-(kept + count + 5) // PAGE) for count, pages in held)

    exact = driver.run([*prompt, *found.token_ids], max_tokens=5, ignore_eos=True)
    again = run(driver, prompt, 12)

    assert exact.cache is not None
    assert exact.cache.cached_tokens == 148
    assert again.token_ids == reference.answer(prompt, 12)
    assert again.cache is not None
    assert again.cache.cached_tokens == (150 - OBSERVED_QUERIES) // PAGE * PAGE
    plain = driver.run([*prompt, *found.token_ids], max_tokens=5, ignore_eos=True)
    assert plain.token_ids == exact.token_ids


def test_what_is_kept_is_never_found_as_the_prompt(models: RandomModels, make_engine: Make) -> None:
    """If the cache loses the exact pages of a prompt while its request decodes, the request leaves none in their place, when it
    ends and when it is preempted."""
    for ends in (True, False):
        driver, prompt = make_engine(**SIZES, max_draft_tokens=0), prompt_of(1, 150)
        found = driver.submit(prompt, max_tokens=20, ignore_eos=True, kv_budget=BUDGET)
        while len(found.token_ids) < 5:
            driver.step()

        driver.engine.kv_cache.forget_domain(b"tenant")
        if ends:
            driver.finish()
        else:
            others = [
                driver.submit(prompt_of(seed, 180), max_tokens=60, tier=ServiceTier.PRIORITY) for seed in range(2, 7)
            ]
            while not driver.loop.stats().preemptions:
                driver.step()
            for one in (found, *others):
                driver.cancel(one)
        exact = driver.run([*prompt, 5], max_tokens=4, ignore_eos=True)

        text = torch.tensor([[*prompt, 5, *exact.token_ids]])
        assert exact.cache is not None
        assert exact.cache.cached_tokens == 0
        assert exact.token_ids == models.references[None](text).logits[0][150:-1].argmax(-1).tolist()


def test_a_session_goes_on_with_exact_kv_of_its_prompts(reference: SnapKvLlama, make_engine: Make) -> None:
    """Each turn finds the pages of the prompt before, computes the answer to it anew, and evicts its own prompt."""
    driver, use, history = make_engine(**SIZES), SessionKey("s"), list[int]()
    for turn in range(4):
        prompt = [*history, *prompt_of(turn, 25 if turn else 80)]
        found = run(driver, prompt, 8, session=SessionUse(use, len(history)))
        assert found.token_ids == reference.answer(prompt, 8)
        assert found.cache is not None
        before = max(len(history) - 8, 0)  # the last prompt
        assert found.cache.cached_tokens == min(before, len(prompt) - OBSERVED_QUERIES) // PAGE * PAGE
        history = [*prompt, *found.token_ids]


def test_neighbours_drafts_and_preemption_change_no_token(models: RandomModels, reference: SnapKvLlama) -> None:
    """Requests with budgets, without, and with windows in the same steps, on a device that is too small for all of them, have
    the answers of the reference; a preempted one evicts its prompt again."""
    page_bytes = models.engine().engine.kv_cache.page_store.sizes.page_bytes
    sizes = SIZES | {"host_kv_bytes": 2**20, "device_bytes": 80 * page_bytes}
    driver = open_engine(models, 4, draft_model=models.base, **sizes)
    prompts = [prompt_of(seed, 70 + 11 * seed) for seed in range(9)]
    options: list[dict[str, Any]] = [{"kv_budget": BUDGET}, {"kv_budget": BUDGET}, {}]

    outcomes = []
    for number, prompt in enumerate(prompts):
        tier = ServiceTier.PRIORITY if number % 4 == 3 else ServiceTier.DEFAULT
        asked = options[number % 3] | {"tier": tier, "domain": b"%d" % number}
        outcomes.append(driver.submit(prompt, max_tokens=20, ignore_eos=True, **asked))
        for _ in range(4):
            driver.step()
            driver.engine.scheduler.check_integrity()
    driver.finish()

    for number, (prompt, found) in enumerate(zip(prompts, outcomes, strict=True)):
        if number % 3 < 2:
            assert found.token_ids == reference.answer(prompt, 20)
        else:
            logits = models.references[None](torch.tensor([[*prompt, *found.token_ids]])).logits[0]
            assert found.token_ids == logits[len(prompt) - 1 : -1].argmax(-1).tolist()
    stats = driver.loop.stats()
    assert stats.preemptions > 0
    assert stats.model_accepted_drafts > 5


def test_an_answer_is_taken_up_where_an_earlier_engine_left_it(reference: SnapKvLlama, make_engine: Make) -> None:
    """With the tokens of an earlier run, the prompt is evicted at its end as before, and the answer goes on alike."""
    prompt = prompt_of(3, 120)
    expected = reference.answer(prompt, 20)

    found = run(make_engine(**SIZES), prompt, 20, emitted=tuple(expected[:9]))

    assert found.token_ids == expected[9:]


def test_steps_that_overlap_change_no_token(reference: SnapKvLlama, make_engine: Make) -> None:
    """The step after a prompt's end is planned when its pages have changed."""
    driver = make_engine(**SIZES, overlap_steps=True, max_draft_tokens=0)
    prompts = [prompt_of(seed, 75 + seed) for seed in range(4)]

    found = [driver.submit(one, max_tokens=9, ignore_eos=True, kv_budget=BUDGET) for one in prompts]
    driver.finish()

    assert [one.token_ids for one in found] == [reference.answer(one, 9) for one in prompts]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"kv_budget": 63}, "kv_budget must be"),
        ({"kv_budget": 64, "attention_window": 8}, "two ways to forget"),
    ],
)
def test_wrong_budgets_are_refused(make_engine: Make, options: dict[str, int], told: str) -> None:
    """A budget without room for a choice, and one beside a rolling window."""
    found = make_engine(**SIZES).run(prompt_of(1, 100), **options)

    assert isinstance(found.error, InvalidRequest)
    assert found.error.param == "kv_budget"
    assert told in found.error.message


def test_a_prompt_with_no_room_beside_what_is_kept_is_refused(make_engine: Make) -> None:
    """On a device of one context, prompt and kept tokens must fit together; a prompt below its budget needs no more room."""
    driver = make_engine(**SIZES)

    whole = driver.run(prompt_of(1, 200), max_tokens=1, kv_budget=240)
    long = driver.run(prompt_of(1, 185), max_tokens=1, kv_budget=BUDGET)

    assert whole.error is None
    assert isinstance(long.error, InvalidRequest)
    assert "it may have 184" in long.error.message


def test_engines_that_cannot_do_it_say_why(models: RandomModels, make_engine: Make) -> None:
    """Steps too small for the observed queries, several devices, and layers that read the keys of others."""
    model, cpu = read_model_config(models.base), torch.device("cpu")

    def why(**options: Any) -> str | None:
        return scheduler_limits(EngineConfig(models.base, **options), model, cpu).why_no_budgets

    assert why() is None
    assert "--tensor-parallel" in str(why(tensor_parallel=2))
    shared = replace(model, kv_sources=(0,) * model.num_layers)
    told = scheduler_limits(EngineConfig(models.base), shared, cpu).why_no_budgets
    assert "layers that read the keys of others" in str(told)
    assert "--max-batch-tokens" in str(why(max_batch_tokens=40, max_running=9))
    found = make_engine(max_batch_tokens=40, max_running=9).run(prompt_of(1, 100), kv_budget=BUDGET)
    assert isinstance(found.error, InvalidRequest)
    assert found.error.message.startswith("kv_budget is not served here: a step of 40 tokens")
