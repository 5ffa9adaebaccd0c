"""Defines how a field of a dataclass becomes a Prometheus metric: its name, kind, help text and labels.

Counts nothing itself. Other modules count, and describe their fields with `counter` and `gauge`. EngineCollector
exports the fields as metrics.
"""

from collections.abc import Iterator
from dataclasses import Field, dataclass, fields
from enum import StrEnum
from typing import Any, ClassVar, Protocol

_KEY = "metrics"


class MetricKind(StrEnum):
    """The kind of a metric. The value of a counter only increases; the value of a gauge can also decrease."""

    COUNTER = "counter"
    GAUGE = "gauge"


@dataclass(frozen=True, slots=True)
class Metric:
    """The description of one Prometheus metric with one set of labels, without its value."""

    name: str
    """The full name, without the `_total` at the end of a counter."""
    kind: MetricKind
    help: str
    labels: tuple[tuple[str, str], ...] = ()
    """Pairs (label, value). Metrics with the same name have the same labels, in the same order."""


class HasFields(Protocol):
    """The type of any dataclass instance."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]


def counter(name: str, help_text: str, **labels: str) -> dict[str, Any]:
    """Returns metadata for a dataclass field, so that Prometheus shows the field as the counter
    `graftwork_<name>_total`.
    """
    return {_KEY: (Metric(f"graftwork_{name}", MetricKind.COUNTER, help_text, tuple(labels.items())),)}


def gauge(name: str, help_text: str, *, also: str | None = None, **labels: str) -> dict[str, Any]:
    """Returns metadata for a dataclass field, so that Prometheus shows the field as the gauge `graftwork_<name>`.

    If `also` is given, Prometheus shows the field a second time, under the name `also`.
    """
    names = [f"graftwork_{name}", *([] if also is None else [also])]
    return {_KEY: tuple(Metric(one, MetricKind.GAUGE, help_text, tuple(labels.items())) for one in names)}


def samples(reading: HasFields) -> Iterator[tuple[Metric, float]]:
    """Yields the metrics of a dataclass instance, each with the value of its field, in the order of the fields."""
    for field in fields(reading):
        for metric in field.metadata.get(_KEY, ()):
            yield metric, getattr(reading, field.name)
