"""Connects the commands to the server, and finds tenants by id or name."""

import os
from typing import TYPE_CHECKING

from graftwork.api.sdk.transport.errors import ConfigurationError

if TYPE_CHECKING:
    from graftwork.api.sdk.client import Graftwork


def connect(max_retries: int = 0) -> "Graftwork":
    """Returns a client for the server at GRAFTWORK_URL.

    The keys come from the environment variables GRAFTWORK_API_KEY and GRAFTWORK_ADMIN_KEY.
    By default the client does not retry, so that a person sees an error at once.
    """
    # httpx takes longer to import than the rest of the program, and `graftwork --help` does not need it.
    from graftwork.api.sdk.client import Graftwork

    return Graftwork(max_retries=max_retries)


def connect_in_own_tenant(otherwise: str = "") -> "Graftwork":
    """Returns a client for what only a person who has signed in may do, in the tenant in which the person acts.

    Raises ConfigurationError if nobody has signed in; `otherwise` is a sentence that says what else can be done.
    A value of GRAFTWORK_API_KEY is sent all the same: it may be a person's token.
    """
    from graftwork.api.sdk.client import base_url_of
    from graftwork.api.sdk.login.login_file import LoginFile

    url = base_url_of(None)
    if not os.environ.get("GRAFTWORK_API_KEY") and LoginFile().find(url) is None:
        message = f"Nobody has signed in at {url}: run `graftwork login` as a tenant-admin. {otherwise}"
        raise ConfigurationError(message.strip())
    return connect()


def tenant_id_of(client: "Graftwork", name_or_id: str) -> str:
    """Returns the id of the tenant whose id or name is `name_or_id`.

    If there is no such tenant, returns `name_or_id` unchanged. The server then answers the caller's request with an
    error.
    Raises ConfigurationError if several tenants have this name.
    """
    found = tenant_ids_of(client, name_or_id)
    if len(found) > 1:
        raise ConfigurationError(f"{len(found)} tenants are called {name_or_id!r}; give an id: {', '.join(found)}.")
    return found[0] if found else name_or_id


def tenant_ids_of(client: "Graftwork", name_or_id: str) -> list[str]:
    """Returns the id of the tenant whose id is `name_or_id`, in a list.

    If there is no such tenant, returns the ids of all tenants whose name is `name_or_id`.
    """
    named: list[str] = []
    after: str | None = None
    while True:
        page = client.admin.tenants.list(limit=100, after=after)
        for tenant in page:
            if tenant.id == name_or_id:
                return [tenant.id]
            if tenant.name == name_or_id:
                named.append(tenant.id)
        if not page.has_more or page.last_id is None:
            return named
        after = page.last_id
