"""The draft head's guesses in a running engine, against EAGLE-3 in plain torch over transformers."""

from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from graftwork.engine.draft_head.head_drafter import DraftHead
from graftwork.engine.speculative.draft_model import DraftContext
from tests.engine.conftest import RandomModels
from tests.engine.draft_head.eagle3 import Eagle3
from tests.engine.engine_driver import EngineDriver
from tests.engine.speculative.test_equal_tokens import open_engine


def head_of(driver: EngineDriver) -> DraftHead:
    drafter = driver.engine.scheduler.speculator.model_drafter
    assert drafter is not None
    assert isinstance(drafter.model, DraftHead)
    return drafter.model


def contexts(driver: EngineDriver) -> Iterator[tuple[str | None, DraftContext]]:
    """The adapter and the text of each running request whose next token is to be generated."""
    for state in driver.engine.scheduler.requests.running.values():
        if len(state.token_ids) > state.num_prompt:
            digest = next(iter(state.request.adapter_digests), None)
            yield digest, DraftContext(state.request_id, tuple(state.token_ids), (), state.request.sampling, state.seed)


def check_chain(model: DraftHead, reference: Eagle3, context: DraftContext, depth: int) -> int:
    """Compares up to `depth` guesses in a row with the reference. Returns how many there were."""
    for done in range(depth):
        if not model.reaches(context, 1):
            return done
        first = model.first_read(context.request_id)
        guess = model.guess([context]).guesses[0]
        if guess is None:
            return done
        text = [*context.token_ids, *context.drafted]
        chances = reference.logits(text, len(context.drafted), first).softmax(-1)
        assert guess.token_id == int(chances.argmax()), (first, len(text), len(context.drafted))
        assert guess.chance == pytest.approx(float(chances.max()), rel=1e-3)
        context = DraftContext(
            context.request_id,
            context.token_ids,
            (*context.drafted, guess.token_id),
            context.sampling,
            context.seed,
        )
    return depth


@pytest.mark.parametrize("is_small", [False, True])
@pytest.mark.parametrize(("num_pages", "max_batch"), [(200, 64), (14, 12)])
def test_guesses_are_those_of_the_paper(
    deep: RandomModels, head: Path, small_head: Path, is_small: bool, num_pages: int, max_batch: int
) -> None:
    """Prompts in chunks, cached prefixes, adapters, rejected drafts and few pages: each guess, its chance and those that
    follow it are the reference's over the part of the text that the head has read."""
    folder, random = small_head if is_small else head, Random(num_pages)
    page_bytes = 4 * 4 * (2 * 2 * 12 + 32)
    driver = open_engine(
        deep, 5, draft_head=folder, draft_kv_bytes=num_pages * page_bytes, max_batch_tokens=max_batch, max_running=4
    )
    references = {digest: Eagle3(folder, model) for digest, model in deep.references.items()}
    model, shared, checked = head_of(driver), [random.randrange(2, 97) for _ in range(17)], list[int]()
    begins: set[int] = set()
    for number in range(10):
        prompt = (shared if number % 2 else []) + [random.randrange(2, 97) for _ in range(random.randint(2, 26))]
        adapter = "sha256:deep" if number % 3 == 1 else None
        driver.submit(prompt, adapter=adapter, max_tokens=random.randint(4, 14), ignore_eos=True)
        for _ in range(4):
            driver.step()
            model.check_integrity()
            checked += [check_chain(model, references[digest], one, 3) for digest, one in contexts(driver)]
            begins |= {model.first_read(one.request_id) for _, one in contexts(driver)}
    driver.finish()
    model.check_integrity()

    assert checked.count(3) > (40 if num_pages > 100 else 8)
    assert driver.loop.stats().model_rejected_drafts > 10
    assert {0, 16} <= begins  # prompts read whole, and behind the four pages of a cached prefix
    assert not model.num_texts


def test_guesses_of_several_requests_in_one_pass(deep: RandomModels, head: Path) -> None:
    """Requests in one pass have the guesses that each has alone, also behind drafts of their own of different lengths."""
    driver = open_engine(deep, 5, draft_head=head, max_batch_tokens=64)
    model, reference = head_of(driver), Eagle3(head, deep.references[None])
    for number in range(3):
        driver.submit([5 + number, 9, 11, 20 + number], max_tokens=30, ignore_eos=True)
    driver.step()
    driver.step()
    asked = [
        DraftContext(one.request_id, one.token_ids, (7, 8, 9)[:number], one.sampling, one.seed)
        for number, (_, one) in enumerate(contexts(driver))
    ]

    done = model.guess(asked)

    assert len(asked) == 3
    for context, guess in zip(asked, done.guesses, strict=True):
        text = [*context.token_ids, *context.drafted]
        assert guess is not None
        expected = reference.logits(text, len(context.drafted), model.first_read(context.request_id))
        assert guess.token_id == int(expected.argmax())
    driver.finish()


def test_what_is_computed_is_not_computed_again(deep: RandomModels, head: Path) -> None:
    """After the pairs of a prompt, each further guess of a chain computes one pair."""
    driver = open_engine(deep, 0, max_batch_tokens=64)
    assert driver.engine.scheduler.speculator.model_drafter is None
    driver = open_engine(deep, 5, draft_head=head, max_batch_tokens=64)
    model = head_of(driver)
    model.taps.reader = model.read_step
    driver.engine.scheduler.speculator.draft = lambda *_, **__: {}  # type: ignore[method-assign]  # the test guesses itself
    driver.submit(list(range(3, 23)), max_tokens=30, ignore_eos=True)
    driver.step()
    ((_, context),) = contexts(driver)

    rows: list[int] = []
    for _ in range(3):
        assert model.num_missing(context) == (20 if not rows else 1)
        done = model.guess([context])
        rows.append(done.num_rows)
        assert done.guesses[0] is not None
        drafted = (*context.drafted, done.guesses[0].token_id)
        context = DraftContext(context.request_id, context.token_ids, drafted, context.sampling, context.seed)

    assert rows == [20, 1, 1]
    driver.step()
    ((_, context),) = contexts(driver)
    assert model.num_missing(context) == 1


def test_a_sampled_request_is_guessed_with_its_own_noise(deep: RandomModels, head: Path) -> None:
    """At temperature 1 the guess is the token that the request's own noise chooses from the head's distribution."""
    driver = open_engine(deep, 5, draft_head=head, max_batch_tokens=64)
    model = head_of(driver)
    for seed in range(20):
        driver.submit([5, 6, 7], max_tokens=6, temperature=1.0, seed=seed, ignore_eos=True, domain=b"%d" % seed)
    driver.step()
    asked = [one for _, one in contexts(driver)]

    guesses = [guess.token_id for guess in model.guess(asked).guesses if guess is not None]
    again = [guess.token_id for guess in model.guess(asked).guesses if guess is not None]

    assert len(asked) > 10
    assert guesses == again
    assert len(set(guesses)) > 5
    driver.finish()


def test_an_engine_without_a_head_keeps_no_states(deep: RandomModels, head: Path) -> None:
    """Only with a head has the runner taps, and logits are the same bits with them and without."""
    plain, tapped = (open_engine(deep, 0 if one is None else 5, draft_head=one) for one in (None, head))
    assert plain.engine.runner.taps is None
    assert tapped.engine.runner.taps is not None
    options: dict[str, Any] = {"max_tokens": 6, "logprobs": 3, "ignore_eos": True}

    one, other = (driver.run([4, 5, 6, 7, 8], **options) for driver in (plain, tapped))

    assert [entry.logprob for entry in one.logprobs] == [entry.logprob for entry in other.logprobs]
    assert torch.isfinite(torch.tensor([entry.logprob for entry in one.logprobs])).all()
