"""Says how long steps of an engine take: by a measurement, or by the roofline of a device.

    MeasuredSpeed   a line through the levels that `graftwork bench throughput` has measured
    RooflineSpeed   bytes over bandwidth and operations over their rate; nobody has measured it

Owns the devices' figures and the assumptions. Never plans.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from graftwork.api.cli.plan.sizes import ModelSizes
from graftwork.api.sdk.transport.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class Device:
    """The data sheet of a device."""

    memory_bytes: float
    bytes_per_s: float
    """Of its memory."""
    flops: float
    """Dense operations in bf16 in a second."""


DEVICES = {
    "H200": Device(141e9, 4.8e12, 989e12),
    "H100": Device(80e9, 3.35e12, 989e12),
    "A100": Device(80e9, 2.04e12, 312e12),
    "L40S": Device(48e9, 0.864e12, 362e12),
}
BANDWIDTH_REACHED = 0.7
FLOPS_REACHED = 0.5
STEP_OVERHEAD_S = 0.001
"""Launches, sampling and scheduling of one step."""
_FEWEST_LEVELS = 2


class Speed(Protocol):
    """The times of an engine's steps, in seconds."""

    def step_s(self, batch: int) -> float:
        """Returns the time of a step that gives each of `batch` requests one token."""
        ...

    def prefill_s(self, tokens: float) -> float:
        """Returns the time to compute so many tokens of prompts."""
        ...

    @property
    def assumptions(self) -> tuple[str, ...]: ...


@dataclass(frozen=True, slots=True)
class Level:
    """One phase of `graftwork bench throughput`."""

    outstanding: int
    tokens_per_s: float
    chats_per_s: float
    latency_s: float | None
    """The mean time of a chat that ended; None if the file is of an older version."""

    @property
    def little(self) -> float | None:
        """By Little's law chats in a second × seconds of a chat = chats outstanding. Returns the quotient: 1 if it holds."""
        if self.latency_s is None:
            return None
        return self.chats_per_s * self.latency_s / self.outstanding


@dataclass(frozen=True, slots=True)
class MeasuredSpeed:
    """Steps take `fixed_s + row_s × batch`, by least squares of the relative errors at the measured levels."""

    levels: tuple[Level, ...]
    fixed_s: float
    row_s: float

    @classmethod
    def fit(cls, levels: Sequence[Level]) -> "MeasuredSpeed":
        """Raises ConfigurationError if fewer than two levels have tokens."""
        found = tuple(one for one in levels if one.tokens_per_s > 0)
        if len({one.outstanding for one in found}) < _FEWEST_LEVELS:
            raise ConfigurationError(
                "The measurement has fewer than two levels with tokens: take `graftwork bench throughput --json` with "
                "--most of at least 2."
            )
        # Each level says that tokens_per_s / outstanding × (fixed + row × outstanding) = 1.
        rows = [(one.tokens_per_s / one.outstanding, one.tokens_per_s) for one in found]
        aa, ab, bb = (sum(left * right for left, right in pairs) for pairs in _products(rows))
        a, b = sum(one for one, _ in rows), sum(other for _, other in rows)
        determinant = aa * bb - ab * ab
        fixed_s, row_s = (a * bb - b * ab) / determinant, (aa * b - ab * a) / determinant
        if fixed_s < 0 or row_s < 0:  # all of the time is of one kind
            fixed_s, row_s = (0.0, b / bb) if fixed_s < 0 else (a / aa, 0.0)
        return cls(found, fixed_s, row_s)

    @classmethod
    def read(cls, path: Path) -> "MeasuredSpeed":
        """Reads what `graftwork bench throughput --json` has printed. Raises ConfigurationError for another file."""
        try:
            return cls.fit(levels_of(json.loads(path.read_text(encoding="utf-8"))))
        except OSError as error:
            raise ConfigurationError(f"{path} cannot be read: {error.strerror}.") from error
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise ConfigurationError(
                f"{path} is no output of `graftwork bench throughput --json` ({error})."
            ) from error

    def step_s(self, batch: int) -> float:
        return self.fixed_s + self.row_s * batch

    def prefill_s(self, tokens: float) -> float:
        return self.row_s * tokens

    @property
    def deviation(self) -> float:
        """The largest relative difference between the line and a measured level."""
        return max(abs(one.outstanding / self.step_s(one.outstanding) / one.tokens_per_s - 1) for one in self.levels)

    @property
    def assumptions(self) -> tuple[str, ...]:
        measured = ", ".join(str(one.outstanding) for one in self.levels)
        return (
            f"measured with {measured} chats outstanding; the line is within {self.deviation:.0%} of them",
            "a prompt token costs no more than a row of a step, and the measured context is the planned one",
        )


@dataclass(frozen=True, slots=True)
class RooflineSpeed:
    """A step takes as long as its bytes or its operations take, whichever is longer."""

    device: Device
    sizes: ModelSizes
    context_tokens: int
    adapters: int
    rank: int

    def step_s(self, batch: int) -> float:
        kv = batch * self.sizes.kv_bytes(self.context_tokens)
        adapters = min(self.adapters, batch) * self.sizes.adapter_bytes(self.rank)
        memory_s = (self.sizes.weights_bytes + kv + adapters) / (BANDWIDTH_REACHED * self.device.bytes_per_s)
        return max(memory_s, self.prefill_s(batch)) + STEP_OVERHEAD_S

    def prefill_s(self, tokens: float) -> float:
        return tokens * self.sizes.token_flops / (FLOPS_REACHED * self.device.flops)

    @property
    def assumptions(self) -> tuple[str, ...]:
        return (
            "NOT MEASURED: a roofline of the data sheet",
            f"steps reach {BANDWIDTH_REACHED:.0%} of the bandwidth and {FLOPS_REACHED:.0%} of the operations in bf16",
            f"a step takes {1000 * STEP_OVERHEAD_S:g} ms more for launches, sampling and scheduling",
            "all contexts are full, no drafts are accepted, attention's operations are not counted",
        )


def levels_of(body: Mapping[str, Any]) -> list[Level]:
    """Reads the levels from the JSON of `graftwork bench throughput`."""
    return [
        Level(
            outstanding=int(phase["name"].split()[0]),
            tokens_per_s=float(phase["tokens_per_s"]),
            chats_per_s=float(phase["chats_per_s"]),
            latency_s=phase["tenants"][0].get("latency_mean") if phase["tenants"] else None,
        )
        for phase in body["phases"]
    ]


def _products(rows: Sequence[tuple[float, float]]) -> list[list[tuple[float, float]]]:
    return [[(a, a) for a, _ in rows], [(a, b) for a, b in rows], [(b, b) for _, b in rows]]
