"""Defines what the engine reports about the steps of a traced request.

Owns the names and figures of a span. All times are seconds of the engine's own clock since the request arrived there,
so they need no clock that engine and gateway share. Spans have counts and times, never token ids.
Invariant: the spans of one run that are not inside others follow each other without a gap, from 0 to the end of its last step, or of its last wait.
"""

from enum import StrEnum
from typing import NamedTuple


class SpanName(StrEnum):
    """What a request did in one span of time."""

    QUEUE = "queue"
    """Waited for a place in the batch, for pages, or for what the next two load."""
    ADAPTER_LOAD = "adapter_load"
    """Waited for an adapter. Inside QUEUE."""
    GRAMMAR_COMPILE = "grammar_compile"
    """Waited for a grammar. Inside QUEUE."""
    KV_LOAD = "kv_load"
    """Waited for cached KV that was copied to the device."""
    PREFILL = "prefill"
    """Computed a chunk of the prompt, or several chunks of a long one. The last step also generates the first token, and
    those drafts that it accepts.
    """
    DECODE = "decode"
    """Generated tokens, in one or more steps."""
    PREEMPTED = "preempted"
    """Had lost its place to another request, and waited for a new one."""

    @property
    def is_inside_queue(self) -> bool:
        return self in (SpanName.ADAPTER_LOAD, SpanName.GRAMMAR_COMPILE)


class EngineSpan(NamedTuple):
    """One span of a traced request: a wait, or one or more steps of one kind.

    A tuple, because gateways make one for every few tokens of a traced stream: it is quicker to make than a frozen
    dataclass.
    """

    name: SpanName
    start_s: float
    duration_s: float
    steps: int = 0
    """The steps in this span that computed the request; 0 for a wait."""
    busy_s: float = 0.0
    """Seconds of those steps. The rest of the span, the request waited for its next step."""
    tokens: int = 0
    """PREFILL: prompt tokens computed. DECODE: tokens generated."""
    batch_requests: float = 0.0
    """The mean number of requests in a step."""
    batch_tokens: float = 0.0
    """The mean number of tokens that a step computed for all requests."""
    drafted: int = 0
    """Draft tokens verified."""
    accepted: int = 0
    """Draft tokens that became part of the answer."""
    masks: int = 0
    """Grammar masks filled for the request's tokens."""
    mask_s: float = 0.0
    """Seconds that it took to fill them. On a GPU, the device computes meanwhile."""
    draft_s: float = 0.0
    """Seconds that it took to find the request's drafts."""
