"""The types of the registry: adapters, immutable versions, and aliases.

Never reads a file or a row. A version never changes once it exists; only aliases move.
"""

import random
import re
from dataclasses import dataclass, field

from graftwork.adapters.format.names import shown
from graftwork.engine.core.requests import AdapterUse
from graftwork.platform.errors import ValidationFailed
from graftwork.platform.ids import AdapterId

_VERSION = re.compile(r"[1-9][0-9]{0,8}", re.ASCII)
_MAX_WEIGHT = 1_000_000


@dataclass(frozen=True, slots=True)
class AdapterVersion:
    """One immutable set of weights. The engine knows it by its `digest`."""

    adapter_id: AdapterId
    name: str
    version: int
    """Counts from 1. A number is never used again, not even after a delete."""
    digest: str
    """`sha256:…` of the scales, the tensors and the base model."""
    rank: int
    """The largest rank of its modules."""
    target_modules: tuple[str, ...]
    size_bytes: int
    """The size of the weights file, as uploaded."""
    created_at: float
    """Unix seconds."""
    status: str = "ready"

    @property
    def label(self) -> str:
        return f"{self.name}@{self.version}"


@dataclass(frozen=True, slots=True)
class AliasTarget:
    """The target of an alias: one version, or several that share the traffic by weight."""

    weights: tuple[tuple[int, float], ...]
    """(version, positive weight) by ascending version. A version gets its weight's share of the sum."""

    @classmethod
    def to_version(cls, version: int) -> "AliasTarget":
        return cls(((version, 1.0),))

    @classmethod
    def from_json(cls, body: object) -> "AliasTarget":
        """`{"version": 2}`, or a canary `{"weights": {"2": 0.9, "3": 0.1}}`. Raises ValidationFailed."""
        match body:
            case {"version": int(version), **rest} if not rest and version > 0 and version is not True:
                return cls.to_version(version)
            case {"weights": dict(weights), **rest} if not rest and weights:
                return cls(tuple(sorted(_read_weight(key, weight) for key, weight in weights.items())))
        message = (
            'An alias leads to one version, {"version": 2}, or to several by weight, {"weights": {"2": 0.9, "3": 0.1}}.'
        )
        raise ValidationFailed(message, param="target")

    @property
    def versions(self) -> tuple[int, ...]:
        return tuple(version for version, _ in self.weights)

    def choose(self, generator: random.Random) -> int:
        """The version of one request: drawn by weight, or the only one without drawing."""
        if len(self.weights) == 1:
            return self.weights[0][0]
        shares = [share for _, share in self.weights]
        return generator.choices(self.versions, weights=shares)[0]

    def to_json(self) -> dict[str, object]:
        """As it came in: `{"version": 2}`, or `{"weights": {"2": 0.9, "3": 0.1}}`."""
        if len(self.weights) == 1:
            return {"version": self.weights[0][0]}
        return {"weights": {str(version): share for version, share in self.weights}}


def _read_weight(key: object, weight: object) -> tuple[int, float]:
    """Read one entry of a canary. Refuses `bool`, which is an int in Python."""
    param = f"weights.{shown(str(key))}"
    if not isinstance(key, str) or not _VERSION.fullmatch(key):
        raise ValidationFailed(f"{param}: the keys of weights are version numbers.", param=param)
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight <= _MAX_WEIGHT:
        raise ValidationFailed(f"{param}: a weight is a number above 0; leave out what gets no traffic.", param=param)
    return int(key), float(weight)


@dataclass(frozen=True, slots=True)
class Adapter:
    """A tenant's name for a line of versions."""

    id: AdapterId
    name: str
    created_at: float
    versions: tuple[AdapterVersion, ...] = ()
    """Sorted by number, ascending."""
    aliases: dict[str, AliasTarget] = field(default_factory=dict)

    @property
    def newest(self) -> AdapterVersion | None:
        return self.versions[-1] if self.versions else None

    @property
    def model_names(self) -> tuple[str, ...]:
        """`name`, then `name@alias` of each alias."""
        return (self.name, *(f"{self.name}@{alias}" for alias in self.aliases))

    def version(self, number: int) -> AdapterVersion | None:
        return next((version for version in self.versions if version.version == number), None)


@dataclass(frozen=True, slots=True)
class AliasChange:
    """The effect of setting or removing an alias. A target is None if there was none, or is none now."""

    adapter: str
    alias: str
    target: AliasTarget | None
    previous: AliasTarget | None


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """The weights that the `model` of a request means."""

    requested: str
    version: AdapterVersion | None
    """None means the base model, or a mixture on it."""
    mixture: tuple[tuple[AdapterVersion, float], ...] = ()
    """The adapter versions of a mixture, with their weights."""

    @property
    def digest(self) -> str | None:
        return self.version.digest if self.version else None

    @property
    def adapters(self) -> tuple[AdapterUse, ...]:
        """What the engine is asked for."""
        if self.version is not None:
            return (AdapterUse(self.version.digest),)
        weights: dict[str, float] = {}
        for version, weight in self.mixture:  # two names may stand for the same weights
            weights[version.digest] = weights.get(version.digest, 0.0) + weight
        return tuple(AdapterUse(digest, weight) for digest, weight in weights.items())

    @property
    def adapter_label(self) -> str | None:
        """`name@3`, or `name@3*0.5+other@1*0.5`; None for the base model. For usage rows and logs."""
        if self.version is not None:
            return self.version.label
        return "+".join(f"{version.label}*{weight:g}" for version, weight in self.mixture) or None

    @property
    def label(self) -> str:
        """The adapters' label, or the base's name as it was asked for."""
        return self.adapter_label or self.requested
