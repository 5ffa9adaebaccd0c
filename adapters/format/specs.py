"""Defines the data types of the adapter registry (adapters, versions and aliases), and parses the names of models.

A request's `model` can be `name`, `name@3` (a version) or `name@alias`. Owns the rules for these names, so that no two
of the three forms look the same, and none looks like a path. Never reads a file or a database row.
Invariant: a version never changes after it was created. An alias can be set to another version.
"""

import hashlib
import math
import re
from dataclasses import dataclass, field

from graftwork.adapters.format.defaults import NO_DEFAULTS, AdapterDefaults
from graftwork.engine.core.requests import AdapterUse
from graftwork.platform.errors import NotFound, ValidationFailed
from graftwork.platform.ids import AdapterId, KeyId, SessionId, TenantId

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}", re.ASCII)


_VERSION_TEXT = re.compile(r"[1-9][0-9]{0,8}", re.ASCII)


_SHOWN_CHARACTERS = 200


@dataclass(frozen=True, slots=True)
class ModelReference:
    """The adapter that a request names in `model`.

    At most one of `version` and `alias` is set. If neither is set, the request gave only the name.
    """

    name: str
    version: int | None = None
    alias: str | None = None


def shown(text: str) -> str:
    """Returns text from a client in a form that is safe in an answer: printable ASCII, at most 200 characters of the
    original.
    """
    escaped = text[:_SHOWN_CHARACTERS].encode("ascii", "backslashreplace").decode("ascii")
    printable = "".join(character if character.isprintable() else f"\\x{ord(character):02x}" for character in escaped)
    return printable if len(text) <= _SHOWN_CHARACTERS else f"{printable}…"


def is_adapter_name(name: str) -> bool:
    """Returns whether `name` has the form of an adapter's name.

    If the result is False, no adapter can have this name, so the caller need not ask the database.
    """
    return _NAME.fullmatch(name) is not None


def check_adapter_name(name: str, base_name: str) -> None:
    """Raises ValidationFailed if no adapter may have this name, because of its form or because it is the base model's
    name.
    """
    if not is_adapter_name(name):
        message = (
            f"'{shown(name)}' cannot be an adapter's name: use 1 to 63 of a-z, 0-9, '.', '_' and '-', "
            "beginning with a letter or a digit."
        )
        raise ValidationFailed(message, param="name", code="invalid_name")
    if name == base_name:
        raise ValidationFailed(f"'{name}' is the base model's name: choose another.", param="name", code="invalid_name")


def check_alias(alias: str) -> None:
    """Raises ValidationFailed if `alias` does not have the form of an alias. A text of digits is refused too."""
    if not _NAME.fullmatch(alias) or alias.isdecimal():
        message = (
            f"'{shown(alias)}' cannot be an alias: use 1 to 63 of a-z, 0-9, '.', '_' and '-', "
            "beginning with a letter or a digit, and not digits alone."
        )
        raise ValidationFailed(message, param="alias", code="invalid_name")


def parse_reference(model: str) -> ModelReference | None:
    """Parses a request's `model`: `name`, `name@3` or `name@alias`. Returns None for a text of any other form."""
    name, at, rest = model.partition("@")
    if not _NAME.fullmatch(name):
        return None
    if not at:
        return ModelReference(name)
    if _VERSION_TEXT.fullmatch(rest):
        return ModelReference(name, version=int(rest))
    if _NAME.fullmatch(rest) and not rest.isdecimal():
        return ModelReference(name, alias=rest)
    return None


def unknown_model(model: str) -> NotFound:
    """Returns the error for a model that the tenant cannot use.

    The error is the same for an unknown name, a malformed name and the name of another tenant's adapter. So it does not
    tell whether another tenant has an adapter with this name.
    """
    message = f"The model '{shown(model)}' does not exist: GET /v1/models lists those that this key can use."
    return NotFound(message, param="model", code="model_not_found")


def unknown_adapter(name: str) -> NotFound:
    """Returns the error that the routes of `/v1/adapters` use if the tenant has no adapter with this name."""
    message = f"The adapter '{shown(name)}' does not exist: GET /v1/adapters lists yours."
    return NotFound(message, param="name", code="adapter_not_found")


_VERSION = re.compile(r"[1-9][0-9]{0,8}", re.ASCII)


_MAX_WEIGHT = 1_000_000


@dataclass(frozen=True, slots=True)
class Provenance:
    """Where a version comes from, as whoever pushed it says. None is unknown."""

    pushed_by: str | None = None
    """The id of the API key that pushed it."""
    run: str | None = None
    """The training run, such as its id or its address."""
    parent: str | None = None
    """The version from which it was trained, such as `support@3`."""
    data_digest: str | None = None
    """`sha256:…` of the training data."""
    source: str | None = None
    """Where the server fetched the files, such as `hf:acme/support-lora@3f2a…`; None if a client sent them."""


UNKNOWN_ORIGIN = Provenance()


@dataclass(frozen=True, slots=True)
class AdapterVersion:
    """One version of an adapter, which never changes. The engine identifies the weights of the version by `digest`."""

    adapter_id: AdapterId
    name: str
    version: int
    """The number of the version, from 1. A number is never used again, not even after a delete."""
    digest: str
    """`sha256:…`, computed from the scales, the tensors and the base model."""
    rank: int
    """The largest rank among the modules of the adapter."""
    target_modules: tuple[str, ...]
    size_bytes: int
    """The size of the uploaded weights file in bytes."""
    created_at: float
    """The time of the upload, in Unix seconds."""
    status: str = "ready"
    """`ready`, or `deleted` while it can be restored."""
    is_held: bool = False
    """Whether the adapter's plain name passes this version over, because it was pushed without being promoted."""
    deleted_at: float | None = None
    base: str = ""
    """The fingerprint of the base model for which the version was made."""
    provenance: Provenance = UNKNOWN_ORIGIN

    @property
    def label(self) -> str:
        return f"{self.name}@{self.version}"


@dataclass(frozen=True, slots=True)
class OwnedVersion:
    """One adapter version of any tenant, for the operator."""

    tenant_id: TenantId
    name: str
    version: int
    digest: str
    size_bytes: int

    @property
    def label(self) -> str:
        return f"{self.name}@{self.version}"


@dataclass(frozen=True, slots=True)
class Caller:
    """The sender of a request as a canary sees it: a session, else an end user, else an API key.

    All requests of one caller to an alias use the same version.
    """

    kind: str
    """`session`, `user` or `key`. So an end user whose name is a session's id is another caller."""
    id: str

    @classmethod
    def of(cls, key_id: KeyId, *, user: str | None = None, session_id: SessionId | None = None) -> "Caller":
        """Returns the caller of a request. `user` is the end user that the request names. An empty text names nobody."""
        if session_id is not None:
            return cls("session", session_id)
        return cls("user", user) if user else cls("key", key_id)


@dataclass(frozen=True, slots=True)
class AliasTarget:
    """The target of an alias: one version, or several versions that share the alias's requests by weight."""

    weights: tuple[tuple[int, float], ...]
    """Pairs of (version, weight), sorted by version. All weights are positive.

    A version gets the fraction weight / (sum of all weights) of the requests.
    """

    @classmethod
    def to_version(cls, version: int) -> "AliasTarget":
        return cls(((version, 1.0),))

    @classmethod
    def from_json(cls, body: object) -> "AliasTarget":
        """Reads the target of an alias from JSON: `{"version": 2}`, or `{"weights": {"2": 0.9, "3": 0.1}}` for several
        versions.

        Raises ValidationFailed if `body` has another form.
        """
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

    def choose(self, alias: str, caller: Caller) -> int:
        """Returns the version that a caller's requests use. `alias` is a text that identifies the alias, such as its
        adapter's id and its name.

        The choice is a hash of the alias, the version and the caller, so it is the same in every process. If the share
        of one version grows, callers move only to this version, and none leaves it. Over many callers, each version gets
        its share.
        Source: weighted rendezvous hashing (Schindelhauer and Schomaker 2005).
        """
        if len(self.weights) == 1:
            return self.weights[0][0]
        return min(self.weights, key=lambda part: -math.log(_uniform(alias, part[0], caller)) / part[1])[0]

    def to_json(self) -> dict[str, object]:
        """Returns the target in the JSON form that `from_json` reads: `{"version": 2}`, or `{"weights": {"2": 0.9, "3":
        0.1}}`.
        """
        if len(self.weights) == 1:
            return {"version": self.weights[0][0]}
        return {"weights": {str(version): share for version, share in self.weights}}


def _uniform(alias: str, version: int, caller: Caller) -> float:
    """Returns a number between 0 and 1, both excluded, that depends on all arguments. Equal arguments give equal numbers."""
    parts = "\0".join((alias, str(version), caller.kind, caller.id)).encode("utf-8", "surrogatepass")
    top = int.from_bytes(hashlib.sha256(parts).digest()[:8]) >> 11  # as many bits as a float holds
    return (top + 0.5) / 2.0**53


def _read_weight(key: object, weight: object) -> tuple[int, float]:
    """Reads one version and its weight. Refuses `bool`, which is an int in Python."""
    param = f"weights.{shown(str(key))}"
    if not isinstance(key, str) or not _VERSION.fullmatch(key):
        raise ValidationFailed(f"{param}: the keys of weights are version numbers.", param=param)
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight <= _MAX_WEIGHT:
        raise ValidationFailed(f"{param}: a weight is a number above 0; leave out what gets no traffic.", param=param)
    return int(key), float(weight)


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter of one tenant, with all its versions and aliases."""

    id: AdapterId
    name: str
    created_at: float
    versions: tuple[AdapterVersion, ...] = ()
    """The versions, sorted by number."""
    aliases: dict[str, AliasTarget] = field(default_factory=dict)
    deleted_versions: tuple[AdapterVersion, ...] = ()
    """The versions that were deleted and can be restored. No request gets them."""
    deleted_at: float | None = None
    """When the adapter was deleted, in Unix seconds; None if it was not."""
    next_version: int = 1
    tags: tuple[str, ...] = ()
    """The tags, sorted."""
    defaults: AdapterDefaults = NO_DEFAULTS
    """What requests have unless they say otherwise."""

    @property
    def newest(self) -> AdapterVersion | None:
        return self.versions[-1] if self.versions else None

    @property
    def served(self) -> AdapterVersion | None:
        """The version that the plain name stands for while no alias says another: the newest that is not held."""
        return next((version for version in reversed(self.versions) if not version.is_held), None)

    @property
    def model_names(self) -> tuple[str, ...]:
        """The texts that select this adapter in a request's `model`: `name`, and `name@alias` for each alias."""
        return (self.name, *(f"{self.name}@{alias}" for alias in self.aliases))

    def version(self, number: int) -> AdapterVersion | None:
        return next((version for version in self.versions if version.version == number), None)


@dataclass(frozen=True, slots=True)
class AliasChange:
    """The old and the new target of an alias that was set or removed.

    `target` is the new target; None if the alias was removed. `previous` is the old target; None if the alias is new.
    """

    adapter: str
    alias: str
    target: AliasTarget | None
    previous: AliasTarget | None


@dataclass(frozen=True, slots=True)
class AliasEvent:
    """One change in the history of an alias."""

    number: int
    """The number of the change among those of the alias, from 1."""
    target: AliasTarget | None
    """The new target; None if the alias was removed."""
    returns_to: int | None
    """The number of the change whose target a rollback restores; None if there is none."""
    reason: str
    """`set`, `removed` or `rollback`, or what a roll-out did."""
    actor: str
    at: float

    @property
    def id(self) -> str:
        return str(self.number)


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """The weights that a request's `model` selects: the base model, one adapter version, or a mixture of versions."""

    requested: str
    version: AdapterVersion | None
    """The adapter version; None for the base model and for a mixture of adapters."""
    mixture: tuple[tuple[AdapterVersion, float], ...] = ()
    """The adapter versions of a mixture with their weights. It is empty for the base model and for a single version."""
    defaults: AdapterDefaults = field(default=NO_DEFAULTS, compare=False)
    """What the adapter's requests have unless they say otherwise. A mixture has none."""

    @property
    def digest(self) -> str | None:
        return self.version.digest if self.version else None

    @property
    def adapters(self) -> tuple[AdapterUse, ...]:
        """The digests of the adapters that the engine must apply for this model, each with its weight in the mixture."""
        if self.version is not None:
            return (AdapterUse(self.version.digest),)
        weights: dict[str, float] = {}
        for version, weight in self.mixture:  # two names may stand for the same weights
            weights[version.digest] = weights.get(version.digest, 0.0) + weight
        return tuple(AdapterUse(digest, weight) for digest, weight in weights.items())

    @property
    def adapter_label(self) -> str | None:
        """The name of the adapter version for usage records and logs, such as `name@3`; None for the base model.

        A mixture has a label such as `name@3*0.5+other@1*0.5`.
        """
        if self.version is not None:
            return self.version.label
        return "+".join(f"{version.label}*{weight:g}" for version, weight in self.mixture) or None

    @property
    def label(self) -> str:
        """A text that names the model: the adapter version, such as `name@3`, or the base model's name as the request
        gave it.

        A mixture has a label such as `name@3*0.5+other@1*0.5`.
        """
        return self.adapter_label or self.requested
