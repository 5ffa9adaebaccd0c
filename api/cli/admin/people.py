"""Defines `graftwork people`, which manages people, their roles, and whether they may sign in, and `graftwork members`,
which lists the people of the tenant in which a tenant-admin has signed in.
"""

from typing import TYPE_CHECKING, Annotated

import typer

from graftwork.api.cli.console.connect import connect, connect_in_own_tenant, tenant_id_of
from graftwork.api.cli.console.output import (
    JsonFlag,
    YesFlag,
    confirm,
    moment,
    note_more,
    show_facts,
    show_json,
    show_table,
    terminal_text,
)
from graftwork.api.sdk.transport.errors import ConfigurationError

if TYPE_CHECKING:
    from graftwork.api.sdk.client import Graftwork
    from graftwork.platform.answers.people import Person

app = typer.Typer(no_args_is_help=True, help="People who sign in, and their roles. Needs GRAFTWORK_ADMIN_KEY.")

PersonArgument = Annotated[
    str, typer.Argument(metavar="PERSON", help="The person's id, e-mail address, or id at the identity provider.")
]
RoleArgument = Annotated[
    str,
    typer.Argument(
        metavar="ROLE",
        help="operator, operator-readonly, or tenant-admin:T, tenant-member:T, tenant-viewer:T; T is a tenant's name or "
        "id, or an organisation's id.",
    ),
]


@app.command(name="list")
def list_people(as_json: JsonFlag = False) -> None:
    """List the people who have signed in or were added, the newest first: 100 at most.

    Example: graftwork people list
    """
    with connect() as client:
        people = client.admin.people.list(limit=100)
    if as_json:
        return show_json(people.raw)
    rows = [
        (
            person.id,
            person.email or person.subject,
            person.status,
            ", ".join(person.roles) or "none",
            ", ".join(person.group_roles) or "none",
            moment(person.signed_in_at),
        )
        for person in people
    ]
    columns = ("id", "who", "status", "roles", "by groups", "last sign-in")
    return show_table(
        columns, rows, "Nobody yet: people are added when they sign in, or by graftwork people add SUBJECT"
    )


@app.command()
def show(person: PersonArgument, as_json: JsonFlag = False) -> None:
    """Show one person.

    Example: graftwork people show ada@example.com
    """
    with connect() as client:
        _show(client.admin.people.get(_person_id(client, person)), as_json)


@app.command()
def add(
    subject: Annotated[str, typer.Argument(help="The person's id at the identity provider: the claim sub.")],
    email: Annotated[str | None, typer.Option(help="What to call the person until the first sign-in.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Add a person who has not signed in yet, so that roles can be granted.

    Example: graftwork people add 00u1abcd --email ada@example.com
    """
    with connect() as client:
        person = client.admin.people.add(subject, email=email)
    _show(person, as_json)
    if not as_json:
        typer.echo(f"Next: graftwork people grant {person.id} ROLE")


@app.command()
def grant(person: PersonArgument, role: RoleArgument, as_json: JsonFlag = False) -> None:
    """Grant a role.

    Example: graftwork people grant ada@example.com tenant-admin:acme
    """
    with connect() as client:
        _show(client.admin.people.grant(_person_id(client, person), _role(client, role)), as_json)


@app.command()
def revoke(person: PersonArgument, role: RoleArgument, yes: YesFlag = False, as_json: JsonFlag = False) -> None:
    """Take back a role that was granted. What the person does by it ends within a second.

    Example: graftwork people revoke ada@example.com tenant-admin:acme --yes
    """
    confirm(f"Take the role {role} from {person}, and end what it has started?", yes)
    with connect() as client:
        _show(client.admin.people.revoke(_person_id(client, person), _role(client, role)), as_json)


@app.command()
def suspend(person: PersonArgument, yes: YesFlag = False, as_json: JsonFlag = False) -> None:
    """Suspend a person: all sessions and tokens end within a second, on every gateway.

    Example: graftwork people suspend ada@example.com --yes
    """
    confirm(f"Suspend {person}, and end all sessions and requests of this person?", yes)
    with connect() as client:
        _show(client.admin.people.suspend(_person_id(client, person)), as_json)


@app.command()
def resume(person: PersonArgument, as_json: JsonFlag = False) -> None:
    """End the suspension of a person, who must sign in again.

    Example: graftwork people resume ada@example.com
    """
    with connect() as client:
        _show(client.admin.people.resume(_person_id(client, person)), as_json)


@app.command()
def delete(person: PersonArgument, yes: YesFlag = False, as_json: JsonFlag = False) -> None:
    """Delete a person with name and roles. The audit log keeps the id alone.

    Example: graftwork people delete ada@example.com --yes
    """
    confirm(f"Delete {person} for good, with all roles?", yes)
    with connect() as client:
        deleted = client.admin.people.delete(_person_id(client, person))
    return show_json(deleted.raw) if as_json else typer.echo(f"Deleted {deleted.id}.")


def members(as_json: JsonFlag = False) -> None:
    """List the people who have a role in your tenant, as its tenant-admin: the newest first, 100 at most.

    Example: graftwork members
    """
    with connect_in_own_tenant("An operator has `graftwork people list`.") as client:
        people = client.members.list(limit=100)
    note_more(people)
    if as_json:
        return show_json(people.raw)
    rows = [
        (person.id, terminal_text(person.name), person.role, person.status, moment(person.signed_in_at))
        for person in people
    ]
    return show_table(("id", "who", "role", "status", "last sign-in"), rows, "Nobody has a role in this tenant.")


def _person_id(client: "Graftwork", text: str) -> str:
    """Returns the id of the person whose id, e-mail address or subject is `text`.

    Raises ConfigurationError if there are several: an address proves nobody's identity where two people have it.
    """
    if text.startswith("per_"):
        return text
    people = client.admin.people
    found = [*(people.list(email=text, limit=100) if "@" in text else ()), *people.list(subject=text, limit=100)]
    ids: list[str] = sorted({person.id for person in found})
    if len(ids) != 1:
        hint = f"give an id: {', '.join(ids)}" if ids else "see graftwork people list"
        raise ConfigurationError(f"{len(ids) or 'No'} people are known as {text!r}; {hint}.")
    return ids[0]


def _role(client: "Graftwork", text: str) -> str:
    """Returns a role with the id of its tenant, where `text` may have the tenant's name."""
    role, separator, place = text.partition(":")
    if not separator or place.startswith(("ten_", "org_")):
        return text
    return f"{role}:{tenant_id_of(client, place)}"


def _show(person: "Person", as_json: bool) -> None:
    if as_json:
        return show_json(person.raw)
    return show_facts(
        [
            ("id", person.id),
            ("email", person.email),
            ("subject", person.subject),
            ("issuer", person.issuer),
            ("status", person.status),
            ("roles", ", ".join(person.roles) or "none"),
            ("by groups", ", ".join(person.group_roles) or "none"),
            ("last sign-in", moment(person.signed_in_at)),
        ]
    )
