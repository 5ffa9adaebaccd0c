"""Defines the roles of people, and what each role may do.

    operator              all of the operator's routes
    operator-readonly     GET on the operator's routes
    tenant-admin:ON       all scopes of an API key
    tenant-member:ON      inference, read, usage
    tenant-viewer:ON      read, usage

ON is a tenant, or an organisation: then the role holds in all tenants that belong to it. A role in a tenant is a set of
the scopes that API keys have (`platform/keys/scopes.py`); there is no second kind of permission.
"""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from graftwork.platform.errors import InvalidRequest, NotPermitted, ValidationFailed
from graftwork.platform.keys.scopes import ALL_SCOPES, Scope
from graftwork.platform.tenancy.principals import Principal
from graftwork.platform.tenancy.tenants import Tenant

_ON = re.compile(r"(ten|org)_[0-9a-z]{1,60}")
GRANT_PATTERN = f"^(operator(-readonly)?|tenant-(admin|member|viewer):{_ON.pattern})$"
"""The form of a grant's text, for the OpenAPI document: `parse_grant` tells more exactly what is wrong."""


class Role(StrEnum):
    """What a person is: an operator of the platform, or somebody of a tenant."""

    OPERATOR = "operator"
    OPERATOR_READONLY = "operator-readonly"
    TENANT_ADMIN = "tenant-admin"
    TENANT_MEMBER = "tenant-member"
    TENANT_VIEWER = "tenant-viewer"


OPERATOR_ROLES = (Role.OPERATOR, Role.OPERATOR_READONLY)
"""The roles of the operator's own people, the strongest first."""
TENANT_ROLES = (Role.TENANT_ADMIN, Role.TENANT_MEMBER, Role.TENANT_VIEWER)
"""The roles of tenants' people, the strongest first."""
SCOPES_OF: Mapping[Role, frozenset[str]] = {
    Role.TENANT_ADMIN: ALL_SCOPES,
    Role.TENANT_MEMBER: frozenset({str(Scope.INFERENCE), str(Scope.READ), str(Scope.USAGE)}),
    Role.TENANT_VIEWER: frozenset({str(Scope.READ), str(Scope.USAGE)}),
}


@dataclass(frozen=True, slots=True, order=True)
class Grant:
    """One role of a person, and on what."""

    role: Role
    on: str = ""
    """The id of the tenant or organisation; empty for an operator's role."""

    @property
    def text(self) -> str:
        """The form in which commands and settings write a grant: `operator`, or `tenant-admin:ten_…`."""
        return f"{self.role}:{self.on}" if self.on else str(self.role)


def parse_grant(text: str) -> Grant:
    """Returns the grant of a text such as `operator` or `tenant-admin:ten_…`. Raises ValidationFailed."""
    name, _, on = text.partition(":")
    if name not in set(Role):
        message = f"There is no role {name!r}; give one of {', '.join(Role)}."
        raise ValidationFailed(message, param="role")
    role = Role(name)
    if role in OPERATOR_ROLES and on:
        raise ValidationFailed(f"The role {role} holds everywhere: write it without {on!r}.", param="role")
    if role in TENANT_ROLES and not _ON.fullmatch(on):
        message = f"The role {role} needs the id of a tenant or an organisation: write {role}:ten_… or {role}:org_…."
        raise ValidationFailed(message, param="role")
    return Grant(role, on)


GroupRoles = Mapping[str, frozenset[Grant]]
"""The roles of the members of each group of the identity provider."""


def parse_group_roles(pairs: Iterable[tuple[str, str]]) -> GroupRoles:
    """Returns the roles of each group, from pairs of the setting `oidc_roles`. Raises InvalidRequest for a wrong role."""
    found: dict[str, frozenset[Grant]] = {}
    for group, text in pairs:
        try:
            found[group] = found.get(group, frozenset()) | {parse_grant(text)}
        except ValidationFailed as error:
            raise InvalidRequest(
                f"oidc_roles: {group}={text} cannot be used; {error.message}", param="oidc_roles"
            ) from error
    return found


def roles_by_groups(group_roles: GroupRoles, groups: Collection[str]) -> frozenset[Grant]:
    """Returns the roles that a person has by these groups."""
    return frozenset(grant for group in groups for grant in group_roles.get(group, ()))


def operator_role(grants: Collection[Grant]) -> Role | None:
    """Returns the strongest operator's role among the grants, or None."""
    held = {grant.role for grant in grants}
    return next((role for role in OPERATOR_ROLES if role in held), None)


def role_in(grants: Collection[Grant], tenant: Tenant) -> Role | None:
    """Returns the strongest role that the grants give in a tenant, or None."""
    places = {tenant.id, tenant.organisation_id} - {None}
    held = {grant.role for grant in grants if grant.on in places}
    return next((role for role in TENANT_ROLES if role in held), None)


def require_tenant_admin(principal: Principal) -> None:
    """Raises NotPermitted unless the sender is a person who has signed in as a tenant-admin. No key may do what they may:
    whoever gets hold of one could make more of them.
    """
    if principal.person_id is None or principal.scopes != SCOPES_OF[Role.TENANT_ADMIN]:
        raise NotPermitted(
            "Keys and members of a tenant are managed by people who have signed in with the role tenant-admin: sign in "
            "as one, or ask the operator.",
            code="not_tenant_admin",
        )


def sorted_texts(grants: Collection[Grant]) -> Sequence[str]:
    """Returns the texts of the grants in a fixed order."""
    return sorted(grant.text for grant in grants)
