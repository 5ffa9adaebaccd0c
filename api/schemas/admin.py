"""Defines the bodies of the operator's routes, and converts tenants, keys, quotas and audit entries to answers."""

from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from fastapi import Body
from pydantic import AfterValidator, BeforeValidator, Field

from graftwork.api.schemas.base import NativeBody
from graftwork.api.schemas.integers import with_integers
from graftwork.api.schemas.shapes import DocumentedAs
from graftwork.engine.fleet.replicas import ReplicaReading
from graftwork.platform.answers import admin as answers
from graftwork.platform.keys.scopes import ALL_SCOPES
from graftwork.platform.modes.modes import DegradedModes
from graftwork.platform.quotas.quota import Quota
from graftwork.platform.tenancy.new_keys import MAX_OVERLAP_S
from graftwork.platform.tenancy.tenants import ApiKey, AuditEntry, Erasure, Organisation, Tenant

Tier = Literal["flex", "default", "priority"]
Name = Annotated[str, Field(min_length=1, max_length=200)]
TenantWeight = Annotated[float, Field(gt=0, le=1000)]


def unix_seconds(value: object) -> object:
    """Converts ISO 8601 text to Unix seconds. Text without a time zone means UTC. Returns other values unchanged.

    Raises ValueError for any other text.
    """
    if not isinstance(value, str):
        return value
    try:
        moment = datetime.fromisoformat(value)
    except ValueError:
        raise ValueError("give unix seconds, or a time such as 2026-01-31T12:00:00Z") from None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


_UnixSeconds = Annotated[float, Field(ge=0, le=1e12)]
_Iso8601 = Annotated[
    str, Field(description="ISO 8601 text. Without a time zone it means UTC.", examples=["2030-01-01T00:00:00Z"])
]
Time = Annotated[_UnixSeconds, BeforeValidator(unix_seconds), DocumentedAs(_UnixSeconds | _Iso8601)]
"""A time as Unix seconds or ISO 8601 text. A body has it as Unix seconds."""


class TenantBody(NativeBody):
    """The body of a request that creates a tenant."""

    name: Name
    weight: TenantWeight = 1.0
    """The tenant's share of the engine. Twice the weight gives twice the share."""
    service_tier_ceiling: Tier = "default"
    organisation_id: Annotated[str, Field(min_length=1, max_length=64)] | None = None
    """The organisation that the tenant belongs to. The default is none."""


class OrganisationBody(NativeBody):
    """The body of a request that creates or renames an organisation."""

    name: Name


class TenantPatch(NativeBody):
    """The body of a request that changes a tenant. Missing and null fields change nothing."""

    name: Name | None = None
    weight: TenantWeight | None = None
    """The tenant's new share of the engine."""
    service_tier_ceiling: Tier | None = None


class KeyBody(NativeBody):
    """The body of a request that creates an API key of a tenant."""

    name: Name
    scopes: list[Annotated[str, Field(json_schema_extra={"enum": sorted(ALL_SCOPES)})]] | None = None
    """The scopes of the key. If this field is null or missing, the key gets all scopes."""
    adapters: list[Annotated[str, Field(min_length=1, max_length=200)]] | None = None
    """The models that the key may name, without versions and aliases; the base model counts. The default is all."""
    allowed_ips: list[Annotated[str, Field(min_length=1, max_length=60)]] | None = None
    """The networks from which the key may be used, such as `192.0.2.0/24` or `2001:db8::/32`. The default is all."""
    expires_at: Time | None = None
    """The time after which the server refuses the key: unix seconds, or ISO 8601 text. The default is no such time."""


class RotationBody(NativeBody):
    """The body of a request that rotates an API key. It may be missing."""

    overlap_s: Annotated[float, Field(ge=0, le=MAX_OVERLAP_S)] = 0.0
    """The seconds for which the old key stays valid. The default is none."""
    expires_at: Time | None = None
    """The time after which the server refuses the new key: unix seconds, or ISO 8601 text. The default is that of the
    old key.
    """


class ModesBody(NativeBody):
    """The body of a request that replaces the degraded modes."""

    max_output_tokens: Annotated[int, Field(ge=1, le=2**31)] | None = None
    """The most tokens of one answer, whatever the request allows. Null, the default, sets no limit."""
    suspend_drafts: bool = False
    """Whether the engine generates without lookup drafts. Answers do not change."""
    refuse_flex: bool = False
    """Whether requests of the service tier `flex` are refused."""

    def modes(self) -> DegradedModes:
        """Returns the modes without a time."""
        return DegradedModes(self.max_output_tokens, self.suspend_drafts, self.refuse_flex)


class TraceSwitchBody(NativeBody):
    """The body of a request that switches the traces of a tenant or a session on."""

    token_ids: bool = False
    """Whether the token ids of its prompts and answers are logged as well. They are as good as the text."""


def modes_answer(modes: DegradedModes) -> answers.Modes:
    """Converts the degraded modes to the body of an answer."""
    return answers.Modes(**asdict(modes))


def replica_answer(reading: ReplicaReading) -> answers.Replica:
    """Converts an engine and its figures to the body of an answer."""
    present: dict[str, Any] = {
        "id": reading.replica_id,
        "address": reading.address,
        "epoch": reading.epoch,
        "status": reading.status,
        "reason": reading.problem,
        "generation": reading.generation,
        "version": reading.version,
        "fingerprint": reading.fingerprint,
    }
    stats = reading.stats
    if stats is None:
        return answers.Replica(**present)
    return answers.Replica(
        **present,
        running_requests=stats.running_requests,
        waiting_requests=stats.waiting_requests,
        device_pages=answers.DevicePages(free=stats.free_pages, cached=stats.cached_pages, active=stats.active_pages),
        host_pages=answers.HostPages(free=stats.host_free_pages, cached=stats.host_cached_pages),
        disk_pages=stats.disk_pages,
        preemptions=stats.preemptions,
        resident_adapters=tuple(stats.resident_adapters),
        max_adapters_in_a_step=stats.max_adapters_in_a_step,
        generated_tokens=stats.generated_tokens,
        steps=stats.steps,
    )


QuotaBody = Annotated[
    dict[str, Any],
    Body(title="Quota"),
    AfterValidator(lambda limits: {name: with_integers(limit) for name, limit in limits.items()}),
    DocumentedAs(Quota),
]
"""The body of a new quota: a mapping from the names of limits to numbers or null. `Quota` checks the values."""


def tenant_answer(tenant: Tenant) -> answers.Tenant:
    """Converts a tenant to the body of an answer on the operator's routes."""
    return answers.Tenant(
        id=tenant.id,
        name=tenant.name,
        status=str(tenant.status),
        weight=tenant.weight,
        service_tier_ceiling=tenant.service_tier_ceiling,
        organisation_id=tenant.organisation_id,
        created_at=int(tenant.created_at),
    )


def organisation_answer(organisation: Organisation) -> answers.Organisation:
    """Converts an organisation to the body of an answer."""
    return answers.Organisation(id=organisation.id, name=organisation.name, created_at=int(organisation.created_at))


def erasure_answer(erasure: Erasure) -> answers.TenantErasure:
    """Converts the state of an erasure to the body of an answer."""
    return answers.TenantErasure(
        tenant_id=erasure.tenant_id,
        status="running" if erasure.erased_at is None else "done",
        deleted_at=erasure.deleted_at,
        erased_at=erasure.erased_at,
    )


def key_answer(key: ApiKey, plaintext: str | None = None) -> answers.TenantKey:
    """Converts an API key to the body of an answer.

    `plaintext` is the key's secret text, or None if the key is not new.
    """
    return answers.TenantKey(
        id=key.id,
        tenant_id=key.tenant_id,
        name=key.name,
        redacted=key.redacted,
        scopes=tuple(sorted(key.scopes)),
        adapters=None if key.adapters is None else tuple(sorted(key.adapters)),
        allowed_ips=key.allowed_ips,
        created_at=int(key.created_at),
        expires_at=key.expires_at,
        revoked_at=key.revoked_at,
        last_used_at=key.last_used_at,
        replaced_by=key.replaced_by,
        person_id=key.person_id,
        key=plaintext,
    )


def audit_answer(entry: AuditEntry, names: Mapping[str, str]) -> answers.AuditEntry:
    """Converts an entry of the audit log, which says who changed what, to the body of an answer.

    `names` are those of the people among the actors, by their ids.
    """
    return answers.AuditEntry(
        id=entry.id,
        at=entry.at,
        actor=entry.actor,
        actor_name=names.get(entry.actor),
        action=entry.action,
        tenant_id=entry.tenant_id,
        target=entry.target,
        details=entry.details,
    )
