"""Tests of `client.keys` and `client.members`: the keys and members of the tenant in which a person acts."""

from collections.abc import AsyncIterator

import pytest

from graftwork.api.sdk.client import AsyncGraftwork
from graftwork.api.sdk.transport import errors
from tests.api.in_process_gateway import ADMIN_KEY, Gateway, TestTenant
from tests.api.sdk.conftest import LossyTransport
from tests.api.signed_in import token_of_person

IN_2100 = 4102444800


def client_with(gateway: Gateway, key: str, losses: int = 0) -> AsyncGraftwork:
    async def sleep(_: float) -> None:
        return None

    transport = LossyTransport(gateway, losses)
    return AsyncGraftwork("http://gateway.test", key, ADMIN_KEY, transport=transport, sleep=sleep)


@pytest.fixture
async def tenant(gateway: Gateway) -> TestTenant:
    return await gateway.tenant()


@pytest.fixture
async def ada(gateway: Gateway, tenant: TestTenant) -> AsyncIterator[AsyncGraftwork]:
    """The client of a tenant-admin who has signed in."""
    async with client_with(gateway, await token_of_person(gateway, tenant.id)) as client:
        yield client


async def test_a_key_from_birth_to_end(gateway: Gateway, tenant: TestTenant, ada: AsyncGraftwork) -> None:
    """A key is created with its rules, works, is rotated with an overlap and revoked; the list has it without its secret."""
    rules = {"scopes": ("read", "usage"), "adapters": ("pirate",), "allowed_ips": ("127.0.0.0/8",)}
    made = await ada.keys.create(name="ci", expires_at="2100-01-01T00:00:00Z", **rules)
    async with client_with(gateway, made.key or "") as program:
        works = (await program.auth.whoami()).key_id
        with pytest.raises(errors.PermissionDeniedError) as lacks:
            await program.exports.list()
    rotated = await ada.keys.rotate(made.id, overlap_s=60, expires_at=IN_2100 - 1)
    revoked = await ada.keys.revoke(rotated.id)
    listed = {key.id: key for key in await ada.keys.list(limit=100)}

    assert (made.name, made.tenant_id, made.expires_at) == ("ci", tenant.id, IN_2100)
    assert (made.scopes, made.adapters, made.allowed_ips) == tuple(rules.values())
    assert (works, lacks.value.code) == (made.id, "missing_scope")
    assert rotated.key not in (None, made.key)
    assert (rotated.scopes, rotated.expires_at) == (made.scopes, IN_2100 - 1)
    assert listed[made.id].replaced_by == rotated.id
    assert listed[made.id].expires_at == gateway.clock.now() + 60
    assert listed[rotated.id] == revoked
    assert (revoked.revoked_at, revoked.key) == (gateway.clock.now(), None)
    assert {key.key for key in listed.values()} == {None}


async def test_an_empty_rule_is_no_missing_rule(tenant: TestTenant, ada: AsyncGraftwork) -> None:
    """A key without any scope gets none, and one without a list of scopes all: for a tenant-admin and for an operator."""
    made = [
        await ada.keys.create(name="models only", scopes=()),
        await ada.admin.keys.create(tenant.id, name="models only", scopes=()),
        await ada.keys.create(name="all", scopes=None),
    ]

    assert [key.scopes for key in made] == [(), (), ("adapters", "export", "inference", "read", "usage")]


async def test_keys_and_members_come_in_pages(gateway: Gateway, tenant: TestTenant, ada: AsyncGraftwork) -> None:
    """`limit` and `after` walk through all keys and all members, for a tenant-admin and, of keys, for an operator."""
    await token_of_person(gateway, tenant.id, "tenant-viewer")
    for name in ("one", "two"):
        await ada.keys.create(name=name)

    keys = [await ada.keys.list(limit=2), await ada.admin.keys.list(tenant.id, limit=2)]
    rest = [await ada.keys.list(after=keys[0].last_id), await ada.admin.keys.list(tenant.id, after=keys[1].last_id)]
    members = await ada.members.list(limit=1)
    older = await ada.members.list(after=members.last_id)

    assert [[key.name for key in page] for page in keys] == [["two", "one"]] * 2
    assert [(page.has_more, "first" in [key.name for key in page]) for page in rest] == [(False, True)] * 2
    assert [member.role for member in (*members, *older)] == ["tenant-viewer", "tenant-admin"]
    assert older.data[0].id == (await ada.auth.whoami()).person.id  # type: ignore[union-attr]
    assert older.data[0].status == "active"


async def test_a_lost_answer_makes_no_second_key(gateway: Gateway, tenant: TestTenant) -> None:
    """A creation and a rotation whose answers are lost happen once; the retry has the new key without its secret."""
    token = await token_of_person(gateway, tenant.id)
    async with client_with(gateway, token, losses=1) as client:
        made = await client.keys.create(name="ci")
    async with client_with(gateway, token, losses=1) as client:
        rotated = await client.keys.rotate(made.id)
        names = [key.name for key in await client.keys.list()]

    assert (made.key, rotated.key) == (None, None)
    assert names.count("ci") == 2


async def test_who_may_not_is_told(gateway: Gateway, tenant: TestTenant) -> None:
    """A key with all scopes and a member get an error that says who may, for each method."""
    for text in (tenant.key, await token_of_person(gateway, tenant.id, "tenant-member")):
        async with client_with(gateway, text) as client:
            for refused in (
                client.keys.create(name="mine"),
                client.keys.list(),
                client.keys.rotate("key_1"),
                client.keys.revoke("key_1"),
                client.members.list(),
            ):
                with pytest.raises(errors.PermissionDeniedError, match="tenant-admin") as error:
                    await refused
                assert error.value.code == "not_tenant_admin"
