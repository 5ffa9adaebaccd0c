"""Answers of a model with recurrent layers do not depend on where its states were: pages, tiers, forks, drafts, preemption."""

from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from graftwork.engine.build.engine import build_engine
from graftwork.engine.core.config import EngineConfig
from graftwork.engine.core.requests import SessionKey, SessionUse
from graftwork.engine.core.session_commands import SessionVerb, ToolWait
from graftwork.engine.kv.disk.file_format import BLOCK_BYTES
from graftwork.engine.model.config import read_model_config
from graftwork.platform.clock import Clock, ManualClock
from tests.engine.engine_driver import EngineDriver, Outcome
from tests.engine.families import ADAPTER, Family, PeftFolders, make_family
from tests.engine.hybrid_families import HYBRID_FAMILIES
from tests.engine.runner.test_decoder_parity import random_prompt
from tests.engine.tagged_kv_cache import load_always

PAGE, MAX_TOKENS = 4, 14
CONTEXT_PAGES = 64 // PAGE


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Family:
    torch.set_num_threads(1)
    return make_family(HYBRID_FAMILIES["granite-hybrid"], tmp_path_factory.mktemp("hybrid"))


def engine(family: Family, clock: Clock | None = None, **options: Any) -> EngineDriver:
    """An engine that loads whatever it can. With a clock that stands still, it drafts whatever it can."""
    settings: dict[str, Any] = {"dtype": "float32", "page_tokens": PAGE, "device_bytes": 2 * 2**20} | options
    source = family.folder.parent / "adapters"
    config = EngineConfig(model=family.folder, **settings)
    return EngineDriver(build_engine(config, lambda found: PeftFolders(source, found), clock, costs=load_always()))


def alone(family: Family, prompt: list[int], adapter: str | None = ADAPTER) -> list[int]:
    """The answer of an engine that computes nothing but this prompt, without drafts."""
    outcome = engine(family, max_draft_tokens=0).run(prompt, adapter=adapter, max_tokens=MAX_TOKENS, ignore_eos=True)
    return outcome.token_ids


def turn(driver: EngineDriver, prompt: list[int], known: int, session: str = "agent") -> Outcome:
    """Runs one turn of a session. The first `known` tokens of the prompt are its history."""
    use = SessionUse(SessionKey(session), known)
    return driver.run(prompt, adapter=ADAPTER, session=use, max_tokens=MAX_TOKENS, ignore_eos=True)


def pages_on(outcome: Outcome) -> tuple[int, int, int]:
    """The whole pages that a prompt found on the device, the host and the disk."""
    assert outcome.cache is not None
    return tuple(  # type: ignore[return-value]
        tokens // PAGE for tokens in (outcome.cache.device_tokens, outcome.cache.host_tokens, outcome.cache.disk_tokens)
    )


def test_an_answer_does_not_depend_on_where_its_state_was(family: Family, tmp_path: Path) -> None:
    """A turn has the same tokens when it is cold, warm, forked, rewound, prefetched, read from the host, or read from disk
    after a restart, each from pages of the expected tier."""
    options: dict[str, Any] = {"disk_kv_bytes": 2**24, "kv_folder": tmp_path / "kv"}
    driver = engine(family, **options)
    opening = random_prompt(Random(3), 22)
    history = opening + turn(driver, opening, 0).token_ids
    prompt = history + random_prompt(Random(4), 7)
    expected, whole = alone(family, prompt), (len(history) - 1) // PAGE

    def command(verb: SessionVerb, tokens: list[int], *waits: ToolWait) -> None:
        driver.command(verb, "agent", tokens, *waits, adapter=ADAPTER)

    command(SessionVerb.HOLD, history, ToolWait("search"))
    warm = turn(driver, prompt, len(history))
    forked = turn(driver, prompt, len(history), session="child")
    command(SessionVerb.SUSPEND, prompt + warm.token_ids)
    from_host = turn(driver, prompt, len(history))
    command(SessionVerb.SUSPEND, prompt + from_host.token_ids)
    command(SessionVerb.PREFETCH, prompt + from_host.token_ids)
    prefetched = turn(driver, prompt, len(history))
    rewound = turn(driver, [*history[: 3 * PAGE], 5, 6, 7], 3 * PAGE)
    driver.close()
    restarted = engine(family, **options)
    from_disk = turn(restarted, prompt, len(history))
    restarted.close()

    turns = {"warm": warm, "forked": forked, "host": from_host, "prefetched": prefetched, "disk": from_disk}
    assert {name: outcome.token_ids for name, outcome in turns.items()} == dict.fromkeys(turns, expected)
    assert rewound.token_ids == alone(family, [*history[: 3 * PAGE], 5, 6, 7])
    most = (len(prompt) - 1) // PAGE
    assert pages_on(warm) == (whole, 0, 0)
    assert pages_on(rewound) == (3, 0, 0)
    assert pages_on(forked) == pages_on(prefetched) == (most, 0, 0)
    assert pages_on(from_host) == (0, most, 0)
    assert pages_on(from_disk) == (0, 0, most)


def test_a_damaged_state_on_disk_is_computed_again(family: Family, tmp_path: Path) -> None:
    """Pages in which one bit of a state has changed are not used, and the answer is the same."""
    options: dict[str, Any] = {"disk_kv_bytes": 2**24, "kv_folder": tmp_path / "kv"}
    driver = engine(family, **options)
    prompt = random_prompt(Random(3), 23)
    expected = turn(driver, prompt, 0).token_ids
    driver.command(SessionVerb.SUSPEND, "agent", prompt + expected, adapter=ADAPTER)
    driver.close()
    model = read_model_config(family.folder)
    page_bytes = model.kv_page_bytes(PAGE, 4)
    for path in (tmp_path / "kv").rglob("*"):
        if path.is_file() and path.stat().st_size > page_bytes:
            content = bytearray(path.read_bytes())
            for start in range(BLOCK_BYTES, len(content), page_bytes):
                content[start + 8] ^= 1  # in the state of the first recurrent layer
            path.write_bytes(content)

    restarted = engine(family, **options)
    again = turn(restarted, prompt, 0)
    restarted.close()

    assert again.token_ids == expected
    assert pages_on(again) == (0, 0, 0)


def test_preempted_requests_go_on_from_their_last_whole_page(family: Family) -> None:
    """On a device with pages for one context and a little more, four requests preempt each other, and each has the answer that
    it has alone."""
    page_bytes = read_model_config(family.folder).kv_page_bytes(PAGE, 4)
    driver = engine(
        family, device_bytes=(CONTEXT_PAGES + 8) * page_bytes, kv_reserve_share=0.0, lora_floor_share=0.0, max_running=4
    )
    prompts = [random_prompt(Random(number), 15 + number) for number in range(4)]

    outcomes = [driver.submit(prompt, max_tokens=40, ignore_eos=True) for prompt in prompts]
    driver.finish()

    assert driver.loop.stats().preemptions > 0
    for prompt, outcome in zip(prompts, outcomes, strict=True):
        plain = engine(family, max_draft_tokens=0).run(prompt, max_tokens=40, ignore_eos=True)
        assert outcome.token_ids == plain.token_ids
    driver.engine.scheduler.check_integrity()


@pytest.mark.parametrize("page_tokens", [2, 4, 16])
def test_drafts_do_not_change_the_answer(family: Family, page_tokens: int) -> None:
    """With predictions that are right, wrong in places or wrong from a place on, the tokens are those without drafts."""
    prompt = random_prompt(Random(9), 9)
    plain = engine(family, max_draft_tokens=0).run(prompt, adapter=ADAPTER, max_tokens=30, ignore_eos=True)
    assert plain.error is None
    answer = plain.token_ids
    spotted = [token if place % 5 else 2 + (token + 1) % 90 for place, token in enumerate(answer)]
    driver = engine(family, ManualClock(), page_tokens=page_tokens)

    for prediction in (answer, spotted, answer[:7] + random_prompt(Random(1), 20)):
        driver.submit(
            prompt,
            adapter=ADAPTER,
            max_tokens=30,
            ignore_eos=True,
            prediction=tuple(prediction),
            domain=b"%d" % prediction[0],
        )
        driver.submit(random_prompt(Random(2), 5), max_tokens=30, ignore_eos=True)
    drafted = list(driver.outcomes.values())[::2]
    driver.finish()

    assert [outcome.token_ids for outcome in drafted] == [answer] * 3
    assert sum(outcome.drafts.accepted_tokens for outcome in drafted) > 0
    assert sum(outcome.drafts.rejected_prediction_tokens for outcome in drafted) > 0 or page_tokens == 2


def test_cached_pages_of_drafted_answers_continue_exactly(family: Family) -> None:
    """A prompt that continues an answer whose tokens were accepted drafts finds all its whole pages, and has the tokens of an
    engine that computes it alone."""
    driver, prompt = engine(family, ManualClock()), random_prompt(Random(9), 9)
    answer = alone(family, prompt)
    drafted = driver.run(prompt, adapter=ADAPTER, max_tokens=MAX_TOKENS, ignore_eos=True, prediction=tuple(answer))

    further = prompt + answer + [3, 4, 5]
    continued = driver.run(further, adapter=ADAPTER, max_tokens=MAX_TOKENS, ignore_eos=True)

    assert drafted.token_ids == answer
    assert drafted.drafts.accepted_tokens > 3
    assert continued.token_ids == alone(family, further)
    assert pages_on(continued) == ((len(prompt + answer) - 1) // PAGE, 0, 0)


def test_states_begin_empty_in_pages_that_hold_anything(family: Family) -> None:
    """In pages that are full of NaN, an answer is that of a fresh engine."""
    driver, prompt = engine(family), random_prompt(Random(6), 18)
    driver.warm(ADAPTER)

    driver.poison_unused_pages()
    poisoned = driver.run(prompt, adapter=ADAPTER, max_tokens=MAX_TOKENS, ignore_eos=True)

    assert poisoned.token_ids == alone(family, prompt)


@pytest.mark.parametrize("seed", range(3))
def test_random_histories_give_the_answers_of_fresh_engines(family: Family, tmp_path: Path, seed: int) -> None:
    """Turns of several sessions at once, on small tiers, with forks, rewinds and predictions, have the tokens that each
    prompt has alone."""
    random, page_bytes = Random(seed), read_model_config(family.folder).kv_page_bytes(PAGE, 4)
    driver = engine(
        family,
        device_bytes=(CONTEXT_PAGES + 14) * page_bytes,
        kv_reserve_share=0.0,
        host_kv_bytes=10 * page_bytes,
        disk_kv_bytes=2**22,
        kv_folder=tmp_path / "kv",
        max_batch_tokens=11,
        max_running=3,
    )
    histories = [random_prompt(random, random.randrange(5, 20)) for _ in range(3)]
    turns = list[tuple[list[int], Outcome]]()
    for _ in range(4):
        begun = list[tuple[int, list[int], Outcome]]()
        for number, history in enumerate(histories):
            kept = history[: random.randrange(1, len(history) + 1)] if random.random() < 0.3 else history
            prompt = (kept + random_prompt(random, random.randrange(1, 6)))[-44:]
            guess = tuple(random_prompt(random, 3)) if random.random() < 0.5 else ()
            use = SessionUse(SessionKey(str(number)), len(kept))
            outcome = driver.submit(
                prompt, session=use, max_tokens=random.randrange(1, 10), ignore_eos=True, prediction=guess
            )
            begun.append((number, prompt, outcome))
        driver.finish()
        for number, prompt, outcome in begun:
            histories[number] = prompt + outcome.token_ids
            verb = random.choice([SessionVerb.HOLD, SessionVerb.SUSPEND, SessionVerb.PREFETCH])
            driver.command(verb, str(number), histories[number])
            turns.append((prompt, outcome))
    driver.engine.scheduler.check_integrity()
    driver.close()

    fresh = engine(family, max_draft_tokens=0)
    for place, (prompt, outcome) in enumerate(turns):
        asked = {"max_tokens": len(outcome.token_ids), "ignore_eos": True, "domain": b"%d" % place}
        assert fresh.run(prompt, **asked).token_ids == outcome.token_ids
