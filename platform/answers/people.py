"""Defines the JSON answers about people: who they are, what they may do, and the tokens of the command line."""

from typing import Literal

from graftwork.platform.answers.base import Answer


class Person(Answer):
    """A person who can sign in with the identity provider."""

    id: str
    object: Literal["person"] = "person"
    issuer: str
    """The identity provider."""
    subject: str
    """The person's id at the identity provider."""
    email: str | None
    """The e-mail address of the last sign-in. Null if the provider gave none that is verified."""
    status: Literal["active", "suspended"]
    roles: tuple[str, ...]
    """The roles that were granted: `operator`, `operator-readonly`, or `tenant-admin:ID` and its like."""
    group_roles: tuple[str, ...]
    """The roles by the person's groups at the provider, as of the last sign-in."""
    created_at: int
    signed_in_at: float | None
    """The time of the last sign-in, in unix seconds. Null for none."""


class TenantMember(Answer):
    """A person who has a role in the sender's tenant."""

    id: str
    object: Literal["tenant.member"] = "tenant.member"
    name: str
    """The person's e-mail address, or else the id at the identity provider."""
    role: str
    """The strongest role in the tenant: `tenant-admin`, `tenant-member` or `tenant-viewer`."""
    status: Literal["active", "suspended"]
    signed_in_at: float | None
    """The time of the last sign-in, in unix seconds. Null for none."""


class TenantSeat(Answer):
    """A tenant in which a person may act."""

    id: str
    object: Literal["tenant.seat"] = "tenant.seat"
    name: str
    role: str


class WhoAmI(Answer):
    """Who sends this request, and what the sender may do."""

    object: Literal["auth.identity"] = "auth.identity"
    kind: Literal["key", "person"]
    acts_as: Literal["operator", "tenant"]
    tenant_id: str | None
    """The tenant in which the sender acts. Null for an operator."""
    tenant_name: str | None
    key_id: str | None
    """The API key with which the sender acts. Null for an operator."""
    scopes: tuple[str, ...]
    """What the sender may do in the tenant."""
    may_change: bool
    """Whether an operator may change anything, and not only read. True for a tenant."""
    person: Person | None
    """The person who has signed in. Null for a key."""
    operator_role: str | None
    """The operator's role of the person, if there is one."""
    tenants: tuple[TenantSeat, ...]
    """The tenants in which the person may act."""


class AccessToken(Answer):
    """A token of a person for one thing to act as."""

    access_token: str
    """Send it as an API key."""
    expires_at: int
    """The time at which the token ends, in unix seconds."""


class PersonTokens(Answer):
    """The tokens that a sign-in at the command line gives."""

    object: Literal["auth.tokens"] = "auth.tokens"
    person: Person
    operator: AccessToken | None
    """The token for the operator's routes. Null for a person who is no operator."""
    tenant: AccessToken | None
    """The token for a tenant's routes. Null if none was named and the person has several or none."""
    tenant_id: str | None
    """The tenant of the token `tenant`."""
    tenants: tuple[TenantSeat, ...]
    """The tenants in which the person may act."""
