"""Requests with a rolling window hold the pages of their sinks and of the window: answers, memory and every way back."""

from collections.abc import Callable
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from graftwork.engine.core.events import FinishReason
from graftwork.engine.core.requests import SessionKey, SessionUse
from graftwork.engine.core.sampling import MOST_ROLLING_TOKENS, RollingWindow
from graftwork.engine.core.session_commands import SessionVerb, ToolWait
from graftwork.engine.kv.index.rolling_pages import RollingPages
from graftwork.platform.errors import ContextLengthExceeded
from tests.engine.attention.streaming_llama import StreamingLlama
from tests.engine.conftest import RandomModels
from tests.engine.engine_driver import EngineDriver, Outcome

PAGE, CONTEXT, STEP = 4, 256, 16
SINKS, WINDOW = 3, 21
MOST_PAGES = 1 + -(-(WINDOW + STEP) // PAGE) + 4
"""The pages of the sinks and of the window, the next step's, and those that begin or end within a page."""
Make = Callable[..., EngineDriver]
sizes = st.integers(1, 40)


def prompt_of(seed: int, length: int) -> list[int]:
    random = Random(seed)
    return [random.randrange(2, 97) for _ in range(length)]


@pytest.fixture
def driver(make_engine: Make) -> EngineDriver:
    return make_engine(
        kernels="torch", max_batch_tokens=STEP, device_bytes=2**17, host_kv_bytes=2**18, max_draft_tokens=4
    )


def check(models: RandomModels, prompt: list[int], found: Outcome) -> None:
    """Compares an answer with the reference's."""
    text = [*prompt, *found.token_ids]
    logits = StreamingLlama(models.references[None], SINKS, WINDOW).logits(text)
    assert found.token_ids == logits[len(prompt) - 1 : -1].argmax(-1).tolist()


def submit(driver: EngineDriver, prompt: list[int], max_tokens: int, **options: Any) -> Outcome:
    window: dict[str, Any] = {"attention_window": WINDOW, "attention_sinks": SINKS}
    return driver.submit(prompt, max_tokens=max_tokens, ignore_eos=True, **window, **options)


def run(driver: EngineDriver, prompt: list[int], max_tokens: int, **options: Any) -> Outcome:
    """Runs one request alone. Pages that nobody holds are filled with NaN, so none of them is read."""
    found = submit(driver, prompt, max_tokens, **options)
    pool = driver.engine.kv_cache.page_store.device
    for number in count():
        if found.is_over:
            break
        if number % 4 == 0:
            driver.poison_unused_pages()
        driver.engine.scheduler.check_integrity()
        assert pool.active_pages <= MOST_PAGES
        driver.step()
    return found


@given(sinks=st.integers(0, 40), window=sizes, page_tokens=sizes, num_tokens=st.integers(0, 400))
def test_a_page_is_given_up_exactly_when_no_later_query_sees_it(
    sinks: int, window: int, page_tokens: int, num_tokens: int
) -> None:
    """Of the pages before a request's last whole page, those that the query there sees are needed, token by token; one more
    is kept."""
    pages = RollingPages.of(RollingWindow(sinks, window), page_tokens, step_tokens=1, layer_window=0)
    num_whole = num_tokens // page_tokens
    last_whole = num_whole * page_tokens
    seen = {token // page_tokens for token in range(last_whole) if token < sinks or last_whole - token < window}

    assert set(pages.needed(num_whole)) == seen
    after = [page for page in range(num_whole) if page >= -(-sinks // page_tokens)]
    kept = {page for page in after if page + 1 in seen or page in seen or page == num_whole - 1}
    assert set(pages.kept(num_whole)) == kept | set(range(num_whole)) - set(after)


@given(
    sinks=st.integers(0, 20),
    window=sizes,
    page_tokens=sizes,
    step=st.integers(1, 50),
    steps=st.lists(st.integers(1, 50), max_size=30),
)
def test_no_request_holds_more_than_the_most(
    sinks: int, window: int, page_tokens: int, step: int, steps: list[int]
) -> None:
    """However a request advances, it holds at most as many pages as the sizes of an engine count."""
    pages = RollingPages.of(RollingWindow(sinks, window), page_tokens, step, layer_window=0)
    total, computed = sum(min(one, step) for one in steps), 0
    for one in steps:
        end = computed + min(one, step)
        held = [
            page
            for page in range(-(-end // page_tokens))
            if page < pages.sink_pages or page >= pages.first_page(computed)
        ]
        assert len(held) <= pages.most_pages(total)
        computed = end


def test_a_text_of_three_contexts_is_answered_in_the_memory_of_its_window(
    models: RandomModels, driver: EngineDriver
) -> None:
    """A prompt longer than the model's context, and an answer behind it, are those of the reference, and no step holds more
    pages than sinks, window and step need."""
    prompt = prompt_of(1, CONTEXT + 171)

    found = run(driver, prompt, 2 * CONTEXT, logprobs=0)

    check(models, prompt, found)
    assert found.finish is FinishReason.LENGTH
    assert len(prompt) + len(found.token_ids) == 3 * CONTEXT + 171
    expected = StreamingLlama(models.references[None], SINKS, WINDOW).logits([*prompt, *found.token_ids])
    chances = expected[len(prompt) - 1 : -1].log_softmax(-1).amax(-1)
    assert torch.allclose(torch.tensor([one.logprob for one in found.logprobs]), chances, atol=5e-4)
    stats = driver.loop.stats()
    assert stats.cached_pages <= 2 * MOST_PAGES  # of the prompt's end, and of the answer's


def test_positions_in_the_hundred_thousands_are_as_exact_as_the_first(models: RandomModels, make_engine: Make) -> None:
    """Behind a text of 100,000 tokens whose window has come round, the logits are those of the reference, whose positions
    never grow."""
    driver = make_engine(kernels="torch", max_batch_tokens=STEP * 8, max_draft_tokens=0)
    period = prompt_of(2, 50)
    prompt = (period * 2001)[:100_000]

    found = run_far(driver, prompt)

    near = [*period, *(prompt[-len(period) * 40 :])]
    expected = StreamingLlama(models.references[None], SINKS, WINDOW).logits([*near, *found.token_ids])
    chances = expected[len(near) - 1 : -1].log_softmax(-1)
    own = torch.tensor([one.logprob for one in found.logprobs])
    assert torch.allclose(own, chances.gather(1, torch.tensor(found.token_ids)[:, None])[:, 0], atol=1e-3)


def run_far(driver: EngineDriver, prompt: list[int]) -> Outcome:
    return driver.run(prompt, max_tokens=4, ignore_eos=True, logprobs=0, attention_window=WINDOW, attention_sinks=SINKS)


def test_windows_that_outgrow_the_device_together_answer_the_same_as_alone(
    models: RandomModels, make_engine: Make
) -> None:
    """On a device of one context, requests with texts of several contexts take turns and are preempted, beside exact ones,
    and each has the answer of the reference."""
    page_bytes = make_engine().engine.kv_cache.page_store.sizes.page_bytes
    driver = make_engine(
        kernels="torch",
        max_batch_tokens=STEP,
        max_running=STEP,
        host_kv_bytes=2**18,
        device_bytes=(CONTEXT // PAGE + 8) * page_bytes,
    )
    prompts = [prompt_of(seed, length) for seed, length in enumerate((300, 40, 90, 270, 10, 120, 33, 180))]

    found = [submit(driver, prompt, 60, domain=b"%d" % number) for number, prompt in enumerate(prompts)]
    exact = [driver.submit(prompt[:30], max_tokens=120, ignore_eos=True) for prompt in prompts[:4]]
    for _ in range(10_000):
        if all(one.is_over for one in (*found, *exact)):
            break
        driver.poison_unused_pages()
        driver.step()
        driver.engine.scheduler.check_integrity()

    for prompt, one in zip(prompts, found, strict=True):
        check(models, prompt, one)
    for prompt, one in zip(prompts, exact, strict=False):
        logits = models.references[None](torch.tensor([[*prompt[:30], *one.token_ids]])).logits[0]
        assert one.token_ids == logits[29:-1].argmax(-1).tolist()
    assert driver.loop.stats().preemptions > 0


@pytest.mark.parametrize("overlap_loads", [False, True], ids=["waits for loads", "overlaps loads"])
def test_a_session_of_many_turns_keeps_its_window_on_every_tier(
    models: RandomModels, make_engine: Make, tmp_path: Path, overlap_loads: bool
) -> None:
    """Each turn finds all whole pages of a history that outgrows the context, on the device, the host or the disk of an
    ended process, and the session holds the bytes of its window alone."""
    options: dict[str, Any] = {"disk_kv_bytes": 2**22, "kv_folder": tmp_path, "host_kv_bytes": 2**19}
    options |= {"kernels": "torch", "max_batch_tokens": STEP, "overlap_loads": overlap_loads, "device_bytes": 2**17}
    use, window = SessionKey("talk"), RollingWindow(SINKS, WINDOW)
    driver, history = make_engine(**options), list[int]()
    page_bytes = driver.engine.kv_cache.page_store.sizes.page_bytes
    kept_pages = 1 + WINDOW // PAGE + 3
    tiers = []
    for turn in range(14):
        prompt = [*history, *prompt_of(turn, 17)]
        found = run(driver, prompt, 12, session=SessionUse(use, len(history)))
        check(models, prompt, found)
        assert found.cache is not None
        whole = (max(len(history) - 1, 0)) // PAGE * PAGE
        assert found.cache.cached_tokens == whole
        tiers.append((found.cache.device_tokens, found.cache.host_tokens, found.cache.disk_tokens).index(whole))
        history = [*prompt, *found.token_ids]
        held = driver.command(SessionVerb.HOLD, use, history, ToolWait("search"), window=window)
        assert 0 < held.device_bytes <= kept_pages * page_bytes
        assert (held.device_tokens + held.missing_tokens, held.missing_tokens) == (
            len(history),
            1 + (len(history) - 1) % PAGE,
        )
        if turn % 3 == 1:
            suspended = driver.command(SessionVerb.SUSPEND, use, history, window=window)
            assert suspended.device_bytes == 0
            assert 0 < suspended.host_bytes <= kept_pages * page_bytes
        elif turn % 3 == 2:
            driver.rest()
            driver.close()
            driver = make_engine(**options)
            prefetched = driver.command(SessionVerb.PREFETCH, use, history, window=window)
            assert 0 < prefetched.disk_bytes <= kept_pages * page_bytes
    assert len(history) > CONTEXT
    assert set(tiers) >= {0, 1}
    driver.command(SessionVerb.CLOSE, use, history, window=window)
    left = driver.loop.stats()
    assert (left.cached_pages, left.host_cached_pages, left.disk_pages) == (0, 0, 0)
    driver.close()


def test_how_long_a_text_may_be(models: RandomModels, driver: EngineDriver) -> None:
    """Without a window, and with one that the context has no room for beside a step, the context is the limit."""
    long, wide = prompt_of(5, CONTEXT + 1), RollingWindow(4, CONTEXT - 20)

    exact = driver.run(long, max_tokens=1)
    too_wide = driver.run(long, max_tokens=1, attention_window=wide.window)
    endless = driver.run([3] * (MOST_ROLLING_TOKENS), max_tokens=1, attention_window=8)

    for found, limit in ((exact, CONTEXT), (too_wide, CONTEXT), (endless, MOST_ROLLING_TOKENS)):
        assert isinstance(found.error, ContextLengthExceeded)
        assert f"maximum context length is {limit} tokens" in found.error.message


def test_a_prompt_that_was_kept_before_its_window_moved_on_is_found_again(
    models: RandomModels, driver: EngineDriver
) -> None:
    """The end of a prompt is found by the same prompt, and a prompt that branches off in its middle finds its sinks alone;
    what has rolled by is found by neither exact requests nor others."""
    prompt = prompt_of(6, 90)
    run(driver, prompt, 40)

    again = run(driver, prompt, 5)
    branch = run(driver, [*prompt[:50], *prompt_of(7, 20)], 5)
    exact = driver.run(prompt, max_tokens=1)

    check(models, prompt, again)
    check(models, [*prompt[:50], *prompt_of(7, 20)], branch)
    for found, cached in ((again, 88), (branch, 4), (exact, 0)):
        assert found.cache is not None
        assert found.cache.cached_tokens == cached
