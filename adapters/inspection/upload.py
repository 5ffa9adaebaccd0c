"""Defines a validated upload of an adapter, and checks it against the limits of its tenant or organisation.

The limits are the number of adapters, their total size in bytes, and the rank. Never reads a file, and never stores
anything: the caller passes the number and size of the tenant's present adapters.
"""

from dataclasses import dataclass, replace
from typing import Any

from graftwork.adapters.format.specs import UNKNOWN_ORIGIN, Adapter, AdapterVersion, Provenance
from graftwork.adapters.inspection.adapter_files import AdapterFiles
from graftwork.adapters.inspection.inspector import IdentifiedAdapter
from graftwork.platform.errors import Conflict, ValidationFailed
from graftwork.platform.ids import EndUserId, KeyId
from graftwork.platform.quotas.limits import Level, keeps_too_much, whose
from graftwork.platform.quotas.quota import Quota


@dataclass(frozen=True, slots=True)
class AdapterUsage:
    """The number of adapters that a tenant has, and the total size of their weights files in bytes."""

    adapters: int
    stored_bytes: int


@dataclass(frozen=True, slots=True)
class Upload:
    """An uploaded adapter that was validated, but is not stored yet."""

    name: str
    files: AdapterFiles
    identified: IdentifiedAdapter
    base_fingerprint: str

    @property
    def digest(self) -> str:
        return self.identified.digest


@dataclass(frozen=True, slots=True)
class Push:
    """Who pushes a version, and how."""

    actor: str = "admin"
    """The id of the API key, for the audit log."""
    is_held: bool = False
    """Whether the adapter's plain name passes the version over."""
    provenance: Provenance = UNKNOWN_ORIGIN
    """Where the version comes from. Who pushed it is `actor`."""
    key_id: KeyId | None = None
    """The API key in whose limits a new adapter counts, if it is another than `actor`."""
    end_user_id: EndUserId | None = None
    """The end user in whose limits a new adapter counts; None if the push names none."""
    expects: int = 0
    """The number that the adapter's next version had when the push began; 0 if it begins now."""

    @property
    def limited_key(self) -> KeyId | None:
        """The API key in whose limits a new adapter counts; None for the operator."""
        return self.key_id or (KeyId(self.actor) if self.actor.startswith("key_") else None)

    @property
    def origin(self) -> Provenance:
        return replace(self.provenance, pushed_by=self.actor)


PLAIN_PUSH = Push()


def check_not_deleted(adapter: Adapter | None) -> None:
    """Raises Conflict for an adapter that was deleted and can be restored: its name is not free yet."""
    if adapter is not None and adapter.deleted_at is not None:
        message = f"'{adapter.name}' was deleted and can still be restored: restore it, or delete it with erase=true, then push."
        raise Conflict(message, param="name", code="adapter_deleted")


def upload_details(version: AdapterVersion) -> dict[str, Any]:
    """Returns what the audit log says of a new version."""
    source = version.provenance.source
    return {
        "digest": version.digest,
        "rank": version.rank,
        "size_bytes": version.size_bytes,
        "is_held": version.is_held,
    } | ({} if source is None else {"source": source})


def check_rank(identified: IdentifiedAdapter, limits: Quota, level: Level = Level.TENANT) -> None:
    most = limits.max_adapter_rank
    if most is not None and identified.rank > most:
        param = "config.r" if identified.r > most else "config.rank_pattern"
        message = f"{param}: rank {identified.rank} is above {whose(level).lower()} limit max_adapter_rank of {most}."
        raise ValidationFailed(message, param=param, code="rank_limit_exceeded")


def check_limits(
    usage: AdapterUsage, upload: Upload, limits: Quota, *, is_new: bool, level: Level = Level.TENANT
) -> None:
    """Raises BudgetSpent if the owner of these limits would keep more than it may."""
    most = limits.max_adapters
    if is_new and most is not None and usage.adapters + 1 > most:
        message = f"{whose(level)} limit max_adapters of {most} is reached: delete an adapter, or ask for more."
        raise keeps_too_much(level, "max_adapters", message, code="max_adapters_exceeded", param="name")
    check_bytes(usage.stored_bytes, upload.files.weights_bytes, limits, level)


def check_bytes(held_bytes: int, more_bytes: int, limits: Quota, level: Level = Level.TENANT) -> None:
    """Raises BudgetSpent if a tenant, or all tenants of its organisation, may not keep so many more bytes."""
    after, most = held_bytes + more_bytes, limits.max_adapter_bytes
    if most is not None and after > most:
        holder = "you" if level is Level.TENANT else f"the tenants of your {level}"
        message = (
            f"With these {more_bytes} bytes {holder} would hold {after}, above {whose(level).lower()} limit "
            f"max_adapter_bytes of {most}: delete versions, or ask for more."
        )
        raise keeps_too_much(level, "max_adapter_bytes", message, code="max_adapter_bytes_exceeded", param="weights")


def version_of(upload: Upload, adapter: Adapter, number: int, now: float) -> AdapterVersion:
    return AdapterVersion(
        adapter_id=adapter.id,
        name=adapter.name,
        version=number,
        digest=upload.digest,
        rank=upload.identified.rank,
        target_modules=upload.identified.target_modules,
        size_bytes=upload.files.weights_bytes,
        created_at=now,
        base=upload.base_fingerprint,
    )
