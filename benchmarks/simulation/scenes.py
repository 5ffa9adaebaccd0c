"""The scenes in which orders of waiting requests are compared: who comes, how often, and with what.

Each scene keeps a promise that can be read from its figures (benchmarks/scheduling.py):

    flood     one tenant at three times the capacity, two light ones, and one of agents over a shared prompt
    weights   three tenants that always have requests waiting, with weights 1, 2 and 4
    prefixes  eight tenants of long documents that are asked about again and again, more than the device holds; without
              a host or disk tier, so that an evicted document is lost (with them, 98.7 % is cached even under VTC)
    agents    three tenants of long coding agents, and one that chats
    long      prompts of 30,000 tokens beside a chat
    tiers     priority requests beside a flood of flex requests and a normal load, with a target of inter-token time
    urgent    priority requests beside a flood of flex requests alone
    chats     the clients of `graftwork bench fairness` on its machine: two heavy tenants, two light ones, one of agents
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from benchmarks.agent_habits import Lognormal
from benchmarks.simulation.clients import (
    CODING_PROGRAM,
    SMALL_PROGRAM,
    AgentClient,
    Client,
    LoopingClient,
    PoissonClient,
    Program,
    Requests,
    Tenant,
)
from benchmarks.simulation.step_cost import DEMO_ON_CPU, DEVICE_ONLY_8B, LLAMA_8B, QWEN_7B, STEADY_8B, Machine

from graftwork.engine.core.requests import ServiceTier

CHAT = Requests(prompt=Lognormal(1_200, 0.7, most=16_000), output=Lognormal(80, 0.6, most=600))
SHORT_CHAT = Requests(prompt=Lognormal(100, 0.5, most=1_000), output=Lognormal(60, 0.5, most=300))
LONG_PROMPT = Requests(prompt=Lognormal(30_000, 0.01), output=Lognormal(50, 0.1))

CHATS_PER_S = 11.0
"""The most chats that LLAMA_8B answers in a second with 64 places, as measured with LoopingClient."""


STORY = Requests(prompt=Lognormal(137, 0.03), output=Lognormal(64, 0.01))
QUESTION = Requests(prompt=Lognormal(60, 0.04), output=Lognormal(8, 0.01))
TALK = Program(
    turns=Lognormal(6, 0.01),
    prompt_tokens=16,
    first=Lognormal(90, 0.05),
    appended=Lognormal(95, 0.05),
    output=Lognormal(24, 0.01),
    tool_s=Lognormal(0.5, 0.01),
    context_tokens=2_000,
)
STORIES_PER_S = 29.0
"""What `graftwork bench fairness` measured as the capacity of DEMO_ON_CPU."""


@dataclass(frozen=True)
class Scene:
    """A machine, and those who use it."""

    name: str
    machine: Machine
    clients: Callable[[int], Sequence[Client]]
    """Makes the clients for a seed."""


def _flood(seed: int) -> list[Client]:
    return [
        PoissonClient(Tenant("heavy"), CHAT, 3 * CHATS_PER_S, seed),
        PoissonClient(Tenant("light-1"), SHORT_CHAT, 0.5, seed),
        PoissonClient(Tenant("light-2"), SHORT_CHAT, 0.5, seed),
        AgentClient(Tenant("agents"), SMALL_PROGRAM, 4, seed),
    ]


def _weights(seed: int) -> list[Client]:
    weighted = (Tenant("one", 1.0), Tenant("two", 2.0), Tenant("four", 4.0))
    return [LoopingClient(tenant, CHAT, 80, seed) for tenant in weighted]


def _prefixes(seed: int) -> list[Client]:
    question, answer = Lognormal(200, 0.5, most=1_000), Lognormal(60, 0.5, most=300)

    def documents(name: str) -> Requests:
        return Requests(question, answer, tuple(f"{name}/{number}" for number in range(8)), 16_384)

    names = [f"reader-{number}" for number in range(1, 9)]
    return [LoopingClient(Tenant(name), documents(name), 30, seed) for name in names]


def _agents(seed: int) -> list[Client]:
    teams = [AgentClient(Tenant(f"team-{number}"), CODING_PROGRAM, 2, seed) for number in range(1, 4)]
    return [*teams, PoissonClient(Tenant("chat"), SHORT_CHAT, 0.5, seed)]


def _long(seed: int) -> list[Client]:
    return [
        PoissonClient(Tenant("long"), LONG_PROMPT, 0.3, seed),
        LoopingClient(Tenant("chat"), CHAT, 16, seed),
    ]


def _tiers(seed: int) -> list[Client]:
    urgent = Tenant("urgent", tier=ServiceTier.PRIORITY)
    return [
        PoissonClient(urgent, SHORT_CHAT, 0.5, seed),
        PoissonClient(Tenant("normal"), CHAT, 0.3 * CHATS_PER_S, seed),
        LoopingClient(Tenant("flex", tier=ServiceTier.FLEX), CHAT, 150, seed),
    ]


def _urgent(seed: int) -> list[Client]:
    return [client for client in _tiers(seed) if client.tenant.name != "normal"]


def _chats(seed: int) -> list[Client]:
    return [
        PoissonClient(Tenant("flood"), STORY, 3 * STORIES_PER_S, seed),
        PoissonClient(Tenant("crowd", 2.0), STORY, 1.2 * STORIES_PER_S, seed),
        PoissonClient(Tenant("light-1"), QUESTION, 2.0, seed),
        PoissonClient(Tenant("light-2"), QUESTION, 2.0, seed),
        AgentClient(Tenant("agents"), TALK, 1, seed),
    ]


SCENES = {
    scene.name: scene
    for scene in (
        Scene("flood", LLAMA_8B, _flood),
        Scene("weights", LLAMA_8B, _weights),
        Scene("prefixes", DEVICE_ONLY_8B, _prefixes),
        Scene("agents", QWEN_7B, _agents),
        Scene("long", LLAMA_8B, _long),
        Scene("tiers", STEADY_8B, _tiers),
        Scene("urgent", STEADY_8B, _urgent),
        Scene("chats", DEMO_ON_CPU, _chats),
    )
}


def alone(scene: Scene, tenant: str) -> Scene:
    """Returns the scene with only the clients of one tenant."""

    def clients(seed: int) -> list[Client]:
        return [client for client in scene.clients(seed) if client.tenant.name == tenant]

    return replace(scene, name=f"{scene.name}: {tenant} alone", clients=clients)
