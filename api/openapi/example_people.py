"""Holds the examples of keys, of people and of their tokens for the OpenAPI document."""

from graftwork.api.openapi.example_objects import CREATED_AT, Json, list_of

KEY_REQUEST: Json = {
    "name": "production",
    "scopes": ["inference", "usage"],
    "adapters": ["support"],
    "allowed_ips": ["192.0.2.0/24", "2001:db8::/32"],
    "expires_at": "2030-01-01T00:00:00Z",
}
KEY: Json = {
    **KEY_REQUEST,
    "id": "key_01hzx",
    "object": "key",
    "tenant_id": "ten_01hzx",
    "redacted": "gw_01hzx_…",
    "created_at": CREATED_AT,
    "expires_at": 1893456000.0,
    "revoked_at": None,
    "last_used_at": None,
    "replaced_by": None,
    "person_id": None,
}
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
    "create_own_key": KEY_REQUEST,
    "rotate_own_key": {"overlap_s": 86400, "expires_at": 1893456000},
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
