"""Tests more agents than the device holds, in tool loops on the demo's model: no cached KV is lost."""

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import pytest

from graftwork.engine.core.prefix_keys import pages_for
from graftwork.engine.core.requests import SessionKey, SessionUse
from graftwork.engine.core.session_commands import SessionMemory, SessionVerb, ToolWait
from graftwork.engine.messages import ForgetAdapter
from tests.engine.demo_engines import JOBS, PAGE, PAGE_BYTES, DemoEngines
from tests.engine.engine_driver import EngineDriver, Outcome

TENANTS = (b"blackbeard", b"corner", b"helpdesk", b"plain")
TOOLS = ("get_order", "search", "open_ticket")
MAX_TOKENS = 20
AT_ONCE = 8


@dataclass
class Agent:
    """One session and its present turn."""

    name: str
    domain: bytes
    adapter: str | None
    opening: list[int]
    history: list[int] = field(default_factory=list)
    turns: int = 0
    prompt: list[int] = field(default_factory=list)
    before: SessionMemory = field(default_factory=SessionMemory)
    outcome: Outcome = field(default_factory=Outcome)

    def command(self, driver: EngineDriver, verb: SessionVerb, *waits: ToolWait) -> SessionMemory:
        return driver.command_now(verb, self.name, self.history, *waits, adapter=self.adapter, domain=self.domain)

    def begin(self, driver: EngineDriver, news: list[int]) -> None:
        """Notes where the session's KV is, and submits its next turn."""
        self.before = self.command(driver, SessionVerb.READ)
        self.prompt = self.history + news if self.history else self.opening
        use = SessionUse(SessionKey(self.name), len(self.history))
        self.outcome = driver.submit(
            self.prompt, adapter=self.adapter, domain=self.domain, session=use, max_tokens=MAX_TOKENS, ignore_eos=True
        )

    def end(self, driver: EngineDriver, tool: str) -> None:
        """Ends the turn with a tool call. The session's KV is held while the tool runs."""
        self.history = self.prompt + self.outcome.token_ids
        self.turns += 1
        self.command(driver, SessionVerb.HOLD, ToolWait(tool))

    def check(self) -> None:
        """Checks that the turn used at least 95 % of the KV that existed before it."""
        report, before = self.outcome.cache, self.before
        assert self.outcome.error is None
        assert report is not None
        assert report.prompt_tokens == len(self.prompt)
        if self.turns:
            resident = before.device_tokens + before.host_tokens + before.disk_tokens
            assert resident + before.missing_tokens == len(self.history)
            assert report.cached_tokens >= 0.95 * resident, f"{report} of {before}"


def work(
    driver: EngineDriver, agents: list[Agent], num_turns: int, tool_result: list[int], random: Random
) -> Counter[str]:
    """Lets every agent take its turns, some at once and in random order, and suspends or prefetches some between turns."""
    found: Counter[str] = Counter()
    idle, busy = list(agents), list[Agent]()
    while idle or busy:
        while idle and len(busy) < AT_ONCE:
            agent = idle.pop(random.randrange(len(idle)))
            if agent.history and random.random() < 0.3:
                agent.command(driver, SessionVerb.PREFETCH)
            agent.begin(driver, tool_result)
            busy.append(agent)
        driver.step()
        for agent in [agent for agent in busy if agent.outcome.is_over]:
            busy.remove(agent)
            agent.check()
            report = agent.outcome.cache
            if report is not None and agent.turns:
                found += Counter(device=report.device_tokens, host=report.host_tokens, disk=report.disk_tokens)
                found += Counter(known=len(agent.history))
            agent.end(driver, random.choice(TOOLS))
            if random.random() < 0.2:
                agent.command(driver, SessionVerb.SUSPEND)
            idle += [agent] if agent.turns < num_turns else []
    return found


@pytest.mark.parametrize(("num_agents", "num_turns"), [(20, 3), pytest.param(100, 5, marks=pytest.mark.slow)])
def test_a_working_set_of_four_devices_loses_nothing_and_leaves_nothing(
    tmp_path: Path, num_agents: int, num_turns: int
) -> None:
    """Every turn after the first finds 95 % of the KV that was on any tier, no request fails, both lower tiers are
    used, and every pool is empty after all sessions and adapters are gone."""
    demo_engines, random = DemoEngines(tmp_path / "artifacts"), Random(1)
    prompts = {job: list(demo_engines.prompts(job, num_agents // 4)) for job in JOBS}
    growth = num_turns * (MAX_TOKENS + len(demo_engines.tool_result(7)))
    working_set = sum(pages_for(len(one) + growth, PAGE) for those in prompts.values() for one in those)
    device = working_set // 4
    driver = demo_engines.engine(
        device_bytes=device * PAGE_BYTES,
        host_kv_bytes=working_set // 2 * PAGE_BYTES,
        disk_kv_bytes=2**30,
        kv_folder=tmp_path / "kv",
    )
    agents = [
        Agent(f"{job}-{number}", TENANTS[number % 4], demo_engines.digests[job], opening)
        for job, openings in prompts.items()
        for number, opening in enumerate(openings)
    ]

    found = work(driver, agents, num_turns, demo_engines.tool_result(7), random)
    for agent in agents:
        agent.command(driver, SessionVerb.CLOSE)
    for digest in driver.loop.stats().resident_adapters:
        driver.loop.take(ForgetAdapter(digest))
    driver.rest()

    stats = driver.loop.stats()
    assert driver.engine.description.device_pages == device
    assert found["host"] > 0
    assert found["disk"] > 0
    assert found["device"] + found["host"] + found["disk"] > 0.9 * found["known"]
    assert (stats.free_pages, stats.cached_pages, stats.active_pages, stats.in_flight_pages) == (device, 0, 0, 0)
    assert (stats.host_free_pages, stats.host_cached_pages, stats.host_in_flight_pages) == (working_set // 2, 0, 0)
    assert stats.disk_pages == 0
    driver.close()
