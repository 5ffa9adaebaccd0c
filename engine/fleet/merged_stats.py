"""Adds up the figures of several engines, as if they were one."""

from collections.abc import Sequence
from dataclasses import fields, replace

from graftwork.engine.core.stats import EngineDescription, EngineStats

_LARGEST = frozenset({"max_adapters_in_a_step", "object_pages", "object_bytes"})
_ANY = frozenset(f"fallback_{part}" for part in ("rows", "attention", "experts", "lora", "sampler", "graphs"))
_MEAN = frozenset({"kv_usage_ratio"})


def merged_stats(readings: Sequence[EngineStats]) -> EngineStats:
    """Returns the sums of counters and sizes, the largest of maxima, the mean of ratios, and all adapters.

    Without readings, all figures are 0.
    """
    if not readings:
        return EngineStats()
    merged = EngineStats()
    for field in fields(EngineStats):
        values = [getattr(reading, field.name) for reading in readings]
        if isinstance(values[0], tuple):
            total: object = tuple(sorted({one for value in values for one in value}))
        elif field.name in _LARGEST or field.name in _ANY or field.name.startswith("start_"):
            total = max(values)
        else:
            total = sum(values) / len(values) if field.name in _MEAN else sum(values)
        setattr(merged, field.name, total)
    return merged


def merged_description(first: EngineDescription, others: Sequence[EngineDescription]) -> EngineDescription:
    """Returns what all engines together can serve: the requests and pages of all, and the shortest context."""
    every = [first, *others]
    return replace(
        first,
        context_tokens=min(one.context_tokens for one in every),
        max_lora_rank=min(one.max_lora_rank for one in every),
        device_pages=sum(one.device_pages for one in every),
        max_requests=_total([one.max_requests for one in every]),
        max_domain_requests=_total([one.max_domain_requests for one in every]),
        epoch=None,
    )


def _total(counts: Sequence[int | None]) -> int | None:
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) else None
