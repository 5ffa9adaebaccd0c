"""Defines the operator's routes for people and their roles."""

from typing import Annotated

from fastapi import APIRouter, Path, Query

from graftwork.api.deps.resources import Admin, ForPeople
from graftwork.api.deps.route_classes import AdminRoute
from graftwork.api.http.pagination import PageQuery, page_answer
from graftwork.api.openapi.declare import also
from graftwork.api.people.views import PersonBody, RoleBody, person_answer
from graftwork.platform.answers import people as answers
from graftwork.platform.answers.base import Deleted, Page
from graftwork.platform.errors import ValidationFailed
from graftwork.platform.ids import PersonId
from graftwork.platform.people.roles import GRANT_PATTERN, parse_grant

router = APIRouter(prefix="/v1/admin/people", tags=["people"], route_class=AdminRoute)

Text = Annotated[str | None, Query(min_length=1, max_length=320)]
RolePath = Annotated[str, Path(json_schema_extra={"pattern": GRANT_PATTERN})]


@router.post("", status_code=201, responses=also(409))
async def add_person(body: PersonBody, resources: ForPeople, admin: Admin) -> answers.Person:
    """Add a person who has not signed in yet, so that roles can be granted. Others are added by their first sign-in."""
    issuer = body.issuer or resources.settings.oidc_issuer
    if issuer is None:
        raise ValidationFailed("This server has no identity provider: name the issuer.", param="issuer")
    return person_answer(await resources.people.add(issuer, body.subject, body.email, actor=admin.name))


@router.get("")
async def list_people(
    resources: ForPeople, _: Admin, page: PageQuery, email: Text = None, subject: Text = None
) -> Page[answers.Person]:
    """List the people who have signed in or were added: all, or those with this e-mail address or subject."""
    return page_answer(await resources.people.list(page, email=email, subject=subject), person_answer)


@router.get("/{person_id}")
async def get_person(person_id: str, resources: ForPeople, _: Admin) -> answers.Person:
    return person_answer(await resources.people.get(PersonId(person_id)))


@router.delete("/{person_id}")
async def delete_person(person_id: str, resources: ForPeople, admin: Admin) -> Deleted:
    """Delete a person: name, roles, sessions and tokens. The audit log keeps the id alone.

    A person who still has an account at the identity provider is added again, without roles, by a sign-in. Suspend a
    person who shall stay out.
    """
    await resources.people.delete(PersonId(person_id), actor=admin.name)
    return Deleted(id=person_id, object="person.deleted")


@router.post("/{person_id}/roles")
async def grant_role(person_id: str, body: RoleBody, resources: ForPeople, admin: Admin) -> answers.Person:
    """Grant a role. It holds at the person's next request."""
    return person_answer(await resources.people.grant(PersonId(person_id), parse_grant(body.role), actor=admin.name))


@router.delete("/{person_id}/roles/{role}")
async def revoke_role(person_id: str, role: RolePath, resources: ForPeople, admin: Admin) -> answers.Person:
    """Take back a role that was granted. What the person does by it ends within a second, on every gateway."""
    return person_answer(await resources.people.revoke(PersonId(person_id), parse_grant(role), actor=admin.name))


@router.post("/{person_id}/suspend")
async def suspend_person(person_id: str, resources: ForPeople, admin: Admin) -> answers.Person:
    """Suspend a person: all sessions, tokens and running requests end within a second, on every gateway."""
    return person_answer(await resources.people.suspend(PersonId(person_id), actor=admin.name))


@router.post("/{person_id}/resume")
async def resume_person(person_id: str, resources: ForPeople, admin: Admin) -> answers.Person:
    """End the suspension of a person, who must sign in again."""
    return person_answer(await resources.people.resume(PersonId(person_id), actor=admin.name))
