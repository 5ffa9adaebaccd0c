"""Defines how a figure is shown to Prometheus: its name, kind, help text and labels.

Counts nothing itself. Other modules count, and describe their figures with `counter` and `gauge`. EngineCollector shows
these figures.
"""

from collections.abc import Iterator
from dataclasses import Field, dataclass, fields
from enum import StrEnum
from typing import Any, ClassVar, Protocol

_KEY = "metrics"


class MetricKind(StrEnum):
    """The kind of a metric. A counter only grows; a gauge goes up and down."""

    COUNTER = "counter"
    GAUGE = "gauge"


@dataclass(frozen=True, slots=True)
class Metric:
    """One line of `/metrics`, without its value."""

    name: str
    """The full name, without the `_total` at the end of a counter."""
    kind: MetricKind
    help: str
    labels: tuple[tuple[str, str], ...] = ()
    """Pairs (label, value). Metrics of one name have the same labels in the same order."""


class HasFields(Protocol):
    """Any dataclass."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]


def counter(name: str, help_text: str, **labels: str) -> dict[str, Any]:
    """Returns the metadata of a dataclass field that is shown as the counter `graftwork_<name>_total`."""
    return {_KEY: (Metric(f"graftwork_{name}", MetricKind.COUNTER, help_text, tuple(labels.items())),)}


def gauge(name: str, help_text: str, *, also: str | None = None, **labels: str) -> dict[str, Any]:
    """Returns the metadata of a dataclass field that is shown as the gauge `graftwork_<name>`.

    If `also` is given, the field is shown under this full name too.
    """
    names = [f"graftwork_{name}", *([] if also is None else [also])]
    return {_KEY: tuple(Metric(one, MetricKind.GAUGE, help_text, tuple(labels.items())) for one in names)}


def samples(reading: HasFields) -> Iterator[tuple[Metric, float]]:
    """Yields each metric of a dataclass with the value of its field, in the order of the fields."""
    for field in fields(reading):
        for metric in field.metadata.get(_KEY, ()):
            yield metric, getattr(reading, field.name)
