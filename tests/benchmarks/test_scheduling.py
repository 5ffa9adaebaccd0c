"""Tests of the simulator of scheduling: its meter against brute force, and what each order of requests promises."""

import statistics
from dataclasses import replace
from itertools import combinations
from random import Random

import pytest
from benchmarks.agent_habits import Lognormal
from benchmarks.scheduling import measure, simulate
from benchmarks.simulation.clients import (
    CODING_PROGRAM,
    SMALL_PROGRAM,
    AgentClient,
    LoopingClient,
    PoissonClient,
    Requests,
    Tenant,
)
from benchmarks.simulation.meter import DriftMeter, jain
from benchmarks.simulation.orders import POLICIES, VTC, Policy
from benchmarks.simulation.scenes import SCENES, Scene
from benchmarks.simulation.step_cost import LLAMA_8B, Machine

from graftwork.engine.core.requests import ServiceTier

SMALL_PROMPT = Requests(Lognormal(30, 0.6, most=120), Lognormal(12, 0.6, most=60))

SMALL_AGENT = replace(
    SMALL_PROGRAM,
    prompt_tokens=32,
    first=Lognormal(9, 0.1),
    appended=Lognormal(5, 0.5, most=20),
    output=Lognormal(6, 0.5, most=20),
    tool_s=Lognormal(0.05, 0.5),
    context_tokens=150,
)


def small_machine(noise: Random) -> Machine:
    """Returns a machine with KV for at most some thousand tokens, in which pages and places both run out."""
    tokens = 16 * noise.randint(16, 128)
    hardware = replace(
        LLAMA_8B.hardware,
        device_kv_bytes=tokens * LLAMA_8B.hardware.kv_token_bytes,
        host_kv_bytes=4 * tokens * LLAMA_8B.hardware.kv_token_bytes,
        disk_kv_bytes=0.0,
        context_tokens=200,
    )
    places = noise.randint(2, 12)
    return replace(
        LLAMA_8B, hardware=hardware, page_tokens=16, max_running=places, max_batch_tokens=16 * noise.randint(2, 8)
    )


# ---- the meter ----------------------------------------------------------------------------------------------------


def test_the_widest_drift_is_that_of_the_worst_interval() -> None:
    """The widest drift is the largest difference of gains over all intervals in which both tenants are backlogged."""
    noise = Random(3)
    for _ in range(50):
        meter, service, history = DriftMeter(), {"a": 0.0, "b": 0.0, "c": 0.0}, []
        for _ in range(25):
            service[noise.choice("abc")] += noise.randint(1, 9)
            backlogged = {name for name in "abc" if noise.random() < 0.8}
            meter.observe(service, backlogged)
            history.append((dict(service), backlogged))

        for one, other in combinations("abc", 2):
            gains = [
                abs(
                    (history[end][0][one] - history[start][0][one])
                    - (history[end][0][other] - history[start][0][other])
                )
                for start in range(len(history))
                for end in range(start, len(history))
                if all({one, other} <= names for _, names in history[start : end + 1])
            ]
            assert meter.widest.get((one, other), 0.0) == max(gains, default=0.0)


def test_jains_index_is_one_for_equals_and_one_nth_for_a_monopoly() -> None:
    """Jain's index is 1 for equal values, 1/n if one of n has everything, and 0.9 for 1, 2 in its closed form."""
    assert jain([3.0, 3.0, 3.0]) == 1.0
    assert jain([7.0, 0.0, 0.0, 0.0]) == 0.25
    assert jain([1.0, 2.0]) == pytest.approx(9 / (2 * 5))


# ---- the simulated engine -----------------------------------------------------------------------------------------


def test_the_same_seed_gives_the_same_run() -> None:
    """Two runs of one scene with one seed have the same figures, and another seed has others."""
    scene = replace(SCENES["flood"], machine=replace(LLAMA_8B, max_running=8))

    first, again, other = (replace(measure(scene, VTC, 4.0, seed), wall_s=0.0) for seed in (0, 0, 1))

    assert first == again
    assert first.tenants != other.tenants


def test_a_lone_request_takes_the_seconds_of_its_steps() -> None:
    """On an idle engine the first token comes after one step of the prompt, and each further one after a decode step."""
    client = PoissonClient(Tenant("lone"), Requests(Lognormal(100, 0.0), Lognormal(3, 0.0)), 0.5, seed=4)
    meter, _ = simulate(Scene("lone", LLAMA_8B, lambda seed: [client]), VTC, 4.0, 0, drain=True)

    figures, cost = meter.tenants["lone"], LLAMA_8B.cost

    assert figures.finished >= 1
    assert figures.ttft_s[0] == pytest.approx(cost.floor_s + 100 * cost.prefill_token_s + cost.attended_s * 5000)
    decoded = [cost.floor_s + cost.row_s + cost.context_token_s * length for length in (100, 101)]
    assert list(figures.gaps_s[:2]) == pytest.approx(decoded)


def test_agents_have_the_published_medians() -> None:
    """Turns of coding agents have 142,000 tokens in, 444 out and 43 turns a program at the median, within 15 %."""
    noise = Random(0)
    prompts, outputs, turns = [], [], []
    for _ in range(600):
        count = CODING_PROGRAM.turns.count(noise)
        turns.append(count)
        context = CODING_PROGRAM.prompt_tokens + CODING_PROGRAM.first.count(noise)
        for _ in range(count):
            prompts.append(context)
            outputs.append(CODING_PROGRAM.output.count(noise))
            context += outputs[-1] + CODING_PROGRAM.appended.count(noise)
            if context >= CODING_PROGRAM.context_tokens:
                break

    assert statistics.median(turns) == pytest.approx(43, rel=0.15)
    assert statistics.median(prompts) == pytest.approx(142_000, rel=0.15)
    assert statistics.median(outputs) == pytest.approx(444, rel=0.15)


@pytest.mark.parametrize("policy", POLICIES.values(), ids=lambda policy: policy.name)
def test_everybody_is_served_in_the_end(policy: Policy) -> None:
    """When nobody sends any more, every request of every tenant and tier ends, and no page is held."""
    clients = [LoopingClient(Tenant(f"{tier}", tier=tier), SMALL_PROMPT, 12) for tier in ServiceTier]
    agents = AgentClient(Tenant("agents"), SMALL_AGENT, 2)
    scene = Scene("all tiers", replace(small_machine(Random(1)), max_running=4), lambda seed: [*clients, agents])

    meter, world = simulate(scene, policy, 2.0, 0, drain=True)

    assert meter.num_open == 0
    assert all(one.finished for one in meter.tenants.values())
    assert world.engine.scheduler.num_running == world.engine.scheduler.num_waiting == 0
