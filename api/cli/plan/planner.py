"""Plans replicas for a demand: their number, their memory, their speed and what tokens cost.

Owns the rules: how many requests run at a time, by memory and by Little's law, and how busy a replica may be. Never
measures.
"""

from dataclasses import dataclass

from graftwork.api.cli.plan.sizes import ModelSizes
from graftwork.api.cli.plan.speeds import Device, Speed
from graftwork.api.sdk.transport.errors import ConfigurationError

MEMORY_SHARE = 0.9
"""The engine's default: what weights, KV and adapters may take of a device."""
MAX_RUNNING = {"cpu": 64, "gpu": 256}
"""The engine's defaults: the most requests of one step."""
BUSY_SHARE = 0.8
"""The part of its largest throughput that a replica is planned for. Above it, queues grow fast."""


@dataclass(frozen=True, slots=True)
class Demand:
    """What all tenants together ask for."""

    tenants: int
    adapters: int
    rank: int
    sessions: int
    """Open at a time, most of them waiting for a tool or a person."""
    context_tokens: int
    """Of a session."""
    requests_per_s: float
    prompt_tokens: int
    """New ones of a request, which no cache has."""
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Plan:
    """What a demand needs. Bytes are of one replica."""

    replicas: int
    running_per_replica: float
    """Requests that run at a time, by Little's law."""
    max_running: int
    """Requests that the device has room for at a time, with full contexts."""
    tokens_per_s: float
    """Generated tokens of one replica with `max_running` requests."""
    busy: float
    """The demanded part of the largest throughput of all replicas."""
    step_s: float
    """A step at the planned load: the time between two tokens."""
    first_token_s: float
    """The time of a prompt and a step, without a wait."""
    weights_bytes: int
    adapters_bytes: int
    """All adapters, which the host keeps; the device has those of running requests."""
    running_kv_bytes: int
    session_kv_bytes: int
    """The KV of this replica's part of all sessions."""
    sessions_on_device: int | None
    """How many of all sessions' contexts fit on the devices; None if the memory is not known."""
    dollars_per_million: float | None
    """For a million generated tokens at the demanded rate; None without a price of the device."""


def make_plan(
    demand: Demand, sizes: ModelSizes, speed: Speed, device: Device | None, dollars_per_hour: float | None
) -> Plan:
    """Returns the plan with the fewest replicas. `device` of None is a CPU. Raises ConfigurationError if the model and one
    context do not fit on the device.
    """
    adapters_bytes = demand.adapters * sizes.adapter_bytes(demand.rank)
    context_bytes = sizes.kv_bytes(demand.context_tokens)
    most = _max_running(demand, sizes, device)
    per_request_s = speed.prefill_s(demand.prompt_tokens) + demand.output_tokens * speed.step_s(most) / most
    most_requests_per_s = 1 / per_request_s
    replicas = max(1, _ceil(demand.requests_per_s / (BUSY_SHARE * most_requests_per_s)))
    arriving = demand.requests_per_s / replicas
    running = _running(demand, speed, arriving, most)
    step_s = speed.step_s(max(1, round(running)))
    room = (
        None if device is None else _room(sizes, device) - min(adapters_bytes, most * sizes.adapter_bytes(demand.rank))
    )
    tokens_per_s = demand.requests_per_s * demand.output_tokens
    return Plan(
        replicas=replicas,
        running_per_replica=running,
        max_running=most,
        tokens_per_s=most_requests_per_s * demand.output_tokens,
        busy=arriving / most_requests_per_s,
        step_s=step_s,
        first_token_s=speed.prefill_s(demand.prompt_tokens) + step_s,
        weights_bytes=sizes.weights_bytes,
        adapters_bytes=adapters_bytes,
        running_kv_bytes=_ceil(running) * context_bytes,
        session_kv_bytes=_ceil(demand.sessions / replicas) * context_bytes,
        sessions_on_device=None if room is None else min(demand.sessions, replicas * int(room // context_bytes)),
        dollars_per_million=_price(dollars_per_hour, replicas, tokens_per_s),
    )


def _room(sizes: ModelSizes, device: Device) -> float:
    """Returns the bytes of the device for KV and adapters."""
    return MEMORY_SHARE * (device.memory_bytes - sizes.weights_bytes)


def _max_running(demand: Demand, sizes: ModelSizes, device: Device | None) -> int:
    """Returns how many full contexts fit on the device at a time, each with an adapter of its own if there are so many."""
    if device is None:
        return MAX_RUNNING["cpu"]
    context, adapter = sizes.kv_bytes(demand.context_tokens), sizes.adapter_bytes(demand.rank)
    room = _room(sizes, device)
    all_adapters = min(demand.adapters, MAX_RUNNING["gpu"]) * adapter
    fits = max(int(room // (context + (adapter if demand.adapters else 0))), int((room - all_adapters) // context))
    if fits < 1:
        raise ConfigurationError(
            f"The weights ({sizes.weights_bytes / 1e9:.1f} GB) and one context ({context / 1e9:.1f} GB) do not fit in "
            f"{device.memory_bytes / 1e9:.0f} GB: take a larger --gpu, or a shorter --context."
        )
    return min(fits, MAX_RUNNING["gpu"])


def _running(demand: Demand, speed: Speed, arriving: float, most: int) -> float:
    """Returns how many requests run at a time, by Little's law: arrivals in a second × seconds of a request.

    The seconds depend on how many run, so this looks for the number at which both agree.
    """
    low, high = 0.0, float(most)
    for _ in range(50):
        middle = (low + high) / 2
        prompts_s = arriving * speed.prefill_s(demand.prompt_tokens)  # the part of the time that prompts take
        seconds = demand.output_tokens * speed.step_s(max(1, round(middle))) / max(1 - prompts_s, 0.01)
        low, high = (middle, high) if arriving * seconds > middle else (low, middle)
    return high


def _price(dollars_per_hour: float | None, replicas: int, tokens_per_s: float) -> float | None:
    if dollars_per_hour is None or not tokens_per_s:
        return None
    return dollars_per_hour * replicas / (3600 * tokens_per_s) * 1e6


def _ceil(value: float) -> int:
    return -int(-value // 1)
