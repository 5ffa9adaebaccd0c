"""Holds the examples of people and their tokens for the OpenAPI document."""

from graftwork.api.openapi.example_objects import CREATED_AT, Json, list_of

PERSON: Json = {
    "id": "per_01hzx",
    "object": "person",
    "issuer": "https://login.example.com",
    "subject": "00u1abcd",
    "email": "ada@example.com",
    "status": "active",
    "roles": ["tenant-admin:ten_01hzx"],
    "group_roles": [],
    "created_at": CREATED_AT,
    "signed_in_at": float(CREATED_AT),
}
_SEAT: Json = {"id": "ten_01hzx", "object": "tenant.seat", "name": "Acme", "role": "tenant-admin"}
_MEMBER: Json = {
    "id": "per_01hzx",
    "object": "tenant.member",
    "name": "ada@example.com",
    "role": "tenant-admin",
    "status": "active",
    "signed_in_at": float(CREATED_AT),
}
PEOPLE_REQUESTS: dict[str, Json] = {
    "create_own_key": {"name": "ci", "scopes": ["inference", "read"]},
    "rotate_own_key": {"overlap_s": 86400},
    "add_person": {"subject": "00u1abcd", "email": "ada@example.com"},
    "grant_role": {"role": "tenant-admin:ten_01hzx"},
    "exchange_id_token": {"tenant": "acme"},
}
PEOPLE_ANSWERS: dict[str, Json] = {
    "list_members": list_of(_MEMBER),
    "add_person": PERSON | {"roles": [], "signed_in_at": None},
    "list_people": list_of(PERSON),
    "get_person": PERSON,
    "delete_person": {"id": "per_01hzx", "object": "person.deleted", "deleted": True},
    "grant_role": PERSON,
    "revoke_role": PERSON | {"roles": []},
    "suspend_person": PERSON | {"status": "suspended"},
    "resume_person": PERSON,
    "exchange_id_token": {
        "object": "auth.tokens",
        "person": PERSON,
        "operator": None,
        "tenant": {"access_token": "gwc_gw_…", "expires_at": CREATED_AT + 900},
        "tenant_id": "ten_01hzx",
        "tenants": [_SEAT],
    },
    "get_whoami": {
        "object": "auth.identity",
        "kind": "person",
        "acts_as": "tenant",
        "tenant_id": "ten_01hzx",
        "tenant_name": "Acme",
        "key_id": "key_01hzx",
        "scopes": ["adapters", "inference", "read", "usage"],
        "may_change": True,
        "person": PERSON,
        "operator_role": None,
        "tenants": [_SEAT],
    },
}
