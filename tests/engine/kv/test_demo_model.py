"""Tests the KV cache with the demo's model and adapters: answers do not depend on where the KV was."""

from pathlib import Path
from typing import Any

import pytest

from graftwork.engine.core.requests import SessionKey, SessionUse
from graftwork.engine.core.session_commands import SessionVerb, ToolWait
from tests.engine.demo_engines import CONTEXT_PAGES, JOBS, PAGE, PAGE_BYTES, DemoEngines
from tests.engine.engine_driver import EngineDriver, Outcome

MAX_TOKENS = 20
ADAPTER_PAGES = 30
"""Pages whose frames hold the first two adapters in fp32."""


@pytest.fixture(scope="module")
def demo_engines(tmp_path_factory: pytest.TempPathFactory) -> DemoEngines:
    return DemoEngines(tmp_path_factory.mktemp("artifacts"))


def turn(driver: EngineDriver, prompt: list[int], known: int, adapter: str | None, session: str = "agent") -> Outcome:
    """Runs one turn of a session. The first `known` tokens of the prompt are its history."""
    return driver.run(
        prompt, adapter=adapter, session=SessionUse(SessionKey(session), known), max_tokens=MAX_TOKENS, ignore_eos=True
    )


def cached_on(outcome: Outcome) -> tuple[int, int, int]:
    """Returns the whole pages that a prompt found on the device, the host and the disk."""
    assert outcome.cache is not None
    report = outcome.cache
    return report.device_tokens // PAGE, report.host_tokens // PAGE, report.disk_tokens // PAGE


@pytest.mark.parametrize("dtype", ["auto", "float32"])
@pytest.mark.parametrize("job", JOBS)
def test_an_answer_does_not_depend_on_where_its_kv_was(
    demo_engines: DemoEngines, tmp_path: Path, job: str, dtype: str
) -> None:
    """A turn has the same tokens when it is warm, forked, rewound, prefetched or read from disk after a restart, each
    with KV from the expected tier; in fp32 a cold turn has them too.

    In bf16, attention rounds a prompt differently from an answer. So recomputed history may differ at a near tie;
    cached history may not.
    """
    options: dict[str, Any] = {"dtype": dtype, "disk_kv_bytes": 2**26}
    cold = demo_engines.engine(**options, kv_folder=tmp_path / "cold")
    driver = demo_engines.engine(**options, kv_folder=tmp_path / "kv")
    adapter = demo_engines.digests[job]
    (opening,) = demo_engines.prompts(job, 1, at_least=300)
    first = turn(driver, opening, 0, adapter)
    history = opening + first.token_ids
    prompt = history + demo_engines.tool_result(7)
    whole = (len(history) - 1) // PAGE  # the last token is sampled, and never computed
    head = (len(prompt) + MAX_TOKENS - 1) // PAGE

    def command(verb: SessionVerb, tokens: list[int], engine: EngineDriver, *waits: ToolWait) -> None:
        engine.command(verb, "agent", tokens, *waits, adapter=adapter)

    cold_answer = turn(cold, prompt, 0, adapter)
    command(SessionVerb.HOLD, history, driver, ToolWait("get_order"))
    warm = turn(driver, prompt, len(history), adapter)
    forked = turn(driver, prompt, len(history), adapter, session="child")
    command(SessionVerb.SUSPEND, prompt + warm.token_ids, driver)
    rewound = turn(driver, prompt, len(history), adapter)
    command(SessionVerb.SUSPEND, prompt + rewound.token_ids, driver)
    command(SessionVerb.PREFETCH, prompt + rewound.token_ids, driver)
    prefetched = turn(driver, prompt, len(history), adapter)
    driver.close()
    restarted = demo_engines.engine(**options, kv_folder=tmp_path / "kv")
    from_disk = turn(restarted, prompt, len(history), adapter)
    restarted.close()
    cold.close()

    turns = {"forked": forked, "rewound": rewound, "prefetched": prefetched, "from_disk": from_disk}
    turns |= {"cold": cold_answer} if dtype == "float32" else {}
    assert {name: outcome.token_ids for name, outcome in turns.items()} == dict.fromkeys(turns, warm.token_ids)
    usable = min(head, (len(prompt) - 1) // PAGE)
    assert cached_on(cold_answer) == (0, 0, 0)
    assert cached_on(warm) == (whole, 0, 0)
    assert cached_on(forked) == (usable, 0, 0)
    assert cached_on(rewound) == (0, usable, 0)
    assert cached_on(prefetched) == (usable, 0, 0)
    assert cached_on(from_disk) == (0, 0, usable)


@pytest.mark.parametrize("host_kv_bytes", [0, 2**24])
def test_answers_that_outgrow_the_device_together_are_the_same_as_alone(
    demo_engines: DemoEngines, host_kv_bytes: int
) -> None:
    """With pages for one context and two adapters, three long answers at once are the same as each alone, and some
    request is preempted."""
    alone = demo_engines.engine()
    jobs = JOBS[:3]
    prompts = {job: next(demo_engines.prompts(job, 1, at_least=640))[:640] for job in jobs}
    expected = {
        job: alone.run(prompts[job], adapter=demo_engines.digests[job], max_tokens=80, ignore_eos=True).token_ids
        for job in jobs
    }
    driver = demo_engines.engine(
        device_bytes=(CONTEXT_PAGES + ADAPTER_PAGES) * PAGE_BYTES, host_kv_bytes=host_kv_bytes, kv_reserve_share=0.0
    )

    outcomes = {
        job: driver.submit(prompts[job], adapter=demo_engines.digests[job], max_tokens=80, ignore_eos=True)
        for job in jobs
    }
    driver.finish()

    assert {job: outcome.token_ids for job, outcome in outcomes.items()} == expected
    assert driver.loop.stats().preemptions > 0
    driver.close()
    alone.close()
