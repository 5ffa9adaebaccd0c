"""The settings of one subject: how the engine's steps are filled, and whose request comes first."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from graftwork.platform.objectives import Objective, parse_deadlines, parse_objectives
from graftwork.platform.settings.setting import setting
from graftwork.platform.settings.values import (
    ModelReference,
    one_of,
    parse_bytes,
    parse_fraction,
    parse_milliseconds,
    parse_model,
    whole,
)


@dataclass(frozen=True)
class SchedulingSettings:
    """How the engine's steps are filled, and whose request comes first."""

    max_batch_tokens: int | None = setting(None, whole(1))
    """Tokens of one engine step, at least 1. More tokens give more throughput and longer steps. None is the engine's
    default for the device."""
    max_running: int | None = setting(None, whole(1))
    """The most requests in one step, at least 1. None is the engine's default for the device."""
    target_itl_ms: float | None = setting(None, parse_milliseconds)
    """The inter-token latency that prompts may cost running streams, in milliseconds: how long a step with both may be. 0
    sets no limit. None is the engine's default for the device."""
    max_waiting: int = setting(256, whole(1))
    """The most requests in the queue, at least 1. When it is full, the tenant with the most requests in it gets a status
    429: for its new request, or for its last one in the queue if a tenant with fewer requests sends one."""
    max_waiting_tokens: int = setting(2**20, whole(1))
    """The most prompt tokens in the queue, at least 1."""
    waiting_share: float = setting(0.75, parse_fraction)
    """The part of the queue, from 0 to 1, that one tenant may fill. One request of each tenant may always wait."""
    scheduling_policy: str = setting("dlpm", one_of("dlpm", "vtc", "fcfs"))
    """How waiting requests are ordered: `dlpm` is fair between tenants and serves cached prefixes first within a bound,
    `vtc` takes strict turns between tenants, `fcfs` serves first who comes first, which is unfair and for comparison.
    """
    fairness_quantum: int | None = setting(None, whole(0))
    """The most by which `dlpm` lets two tenants of weight 1 differ for cached prefixes, in prompt tokens; 0 means strict
    turns, and None is four steps of prompt tokens."""
    kv_price: float = setting(0.25, parse_fraction)
    """What holding all KV pages of the device for a second costs a tenant, as a part, from 0 to 1, of the prompt tokens
    that the device computes in a second.
    """
    deadlines: Mapping[str, float] = setting({}, parse_deadlines)
    """By service tier, seconds to the first token that a request without `x-deadline-ms` gets as its deadline."""
    objectives: Mapping[str, Objective] = setting({}, parse_objectives)
    """By service tier, what its requests are promised; `/metrics` shows burn rates and error budgets."""
    max_draft_tokens: int = setting(16, whole(0, 256))
    """The most tokens drafted for one request in one step; 0 switches drafting off. Answers stay the same."""
    draft_model: Path | ModelReference | None = setting(None, parse_model)
    """A small model with the tokenizer of the served one, which drafts tokens where it is measured to pay: its folder,
    `hf:ORGANISATION/NAME@REVISION`, or `s3://BUCKET/PREFIX`. None drafts from text alone."""
    draft_head: Path | ModelReference | None = setting(None, parse_model)
    """An EAGLE-3 head of the served model, which drafts tokens from its hidden states in the place of a draft model: its
    folder, or as for `draft_model`."""
    draft_kv_bytes: int | None = setting(None, parse_bytes)
    """Bytes of device memory for the draft model's KV, or for what a draft head keeps. None is the engine's default."""
