"""Defines `client.admin.people`, which manages people and their roles, and `client.auth`, which tells who the sender is."""

from graftwork.api.sdk.transport.effects import Call, Steps
from graftwork.api.sdk.transport.operation import R, Resource, operation, path_segment
from graftwork.platform.answers.base import Deleted, Page
from graftwork.platform.answers.people import Person, WhoAmI

_PEOPLE = "/v1/admin/people"


def _path(person_id: str) -> str:
    return f"{_PEOPLE}/{path_segment(person_id)}"


class Auth(Resource[R]):
    """Tells who the client is. Sends requests to `/v1/auth`."""

    @operation
    def whoami(self, *, admin: bool = False) -> Steps[WhoAmI]:
        """Returns as what the client acts with its tenant's key or token, or, for `admin`, with the operator's."""
        return (yield from self._read(WhoAmI, Call("GET", "/v1/auth/whoami", admin=admin)))


class People(Resource[R]):
    """Adds people, grants and takes back their roles, and suspends them. Sends requests to `/v1/admin/people`."""

    @operation
    def add(self, subject: str, *, email: str | None = None, issuer: str | None = None) -> Steps[Person]:
        """Adds a person who has not signed in yet. `subject` is the person's id at the identity provider."""
        given = {"subject": subject, "email": email, "issuer": issuer}
        body = {name: value for name, value in given.items() if value is not None}
        return (yield from self._read(Person, Call("POST", _PEOPLE, json=body, admin=True, creates=True)))

    @operation
    def list(
        self,
        *,
        email: str | None = None,
        subject: str | None = None,
        limit: int | None = None,
        after: str | None = None,
    ) -> Steps[Page[Person]]:
        query = {"email": email, "subject": subject, "limit": limit, "after": after}
        return (yield from self._page(Person, Call("GET", _PEOPLE, query=query, admin=True)))

    @operation
    def get(self, person_id: str) -> Steps[Person]:
        return (yield from self._read(Person, Call("GET", _path(person_id), admin=True)))

    @operation
    def grant(self, person_id: str, role: str) -> Steps[Person]:
        """Grants a role, such as `operator` or `tenant-admin:ten_…`."""
        call = Call("POST", f"{_path(person_id)}/roles", json={"role": role}, admin=True)
        return (yield from self._read(Person, call))

    @operation
    def revoke(self, person_id: str, role: str) -> Steps[Person]:
        """Takes a role back. What the person does by it ends within a second."""
        path = f"{_path(person_id)}/roles/{path_segment(role)}"
        return (yield from self._read(Person, Call("DELETE", path, admin=True)))

    @operation
    def suspend(self, person_id: str) -> Steps[Person]:
        """Suspends a person. All sessions and tokens of the person end within a second."""
        return (yield from self._read(Person, Call("POST", f"{_path(person_id)}/suspend", admin=True)))

    @operation
    def resume(self, person_id: str) -> Steps[Person]:
        return (yield from self._read(Person, Call("POST", f"{_path(person_id)}/resume", admin=True)))

    @operation
    def delete(self, person_id: str) -> Steps[Deleted]:
        """Deletes a person with name and roles. The audit log keeps the id."""
        return (yield from self._read(Deleted, Call("DELETE", _path(person_id), admin=True)))
