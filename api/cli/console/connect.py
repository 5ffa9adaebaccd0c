"""Connects the commands to the server, and finds tenants by id or name."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from graftwork.api.sdk.client import Graftwork


def connect(max_retries: int = 0) -> "Graftwork":
    """Returns a client for the server at GRAFTWORK_URL, with the keys of the environment.

    By default the client does not retry, so that a person sees an error at once.
    """
    # httpx takes longer to import than the rest of the program, and `graftwork --help` does not need it.
    from graftwork.api.sdk.client import Graftwork

    return Graftwork(max_retries=max_retries)


def tenant_id_of(client: "Graftwork", name_or_id: str) -> str:
    """Returns the id of the tenant with this id or name.

    If there is no such tenant, returns the text unchanged, and the server then refuses it.
    """
    after: str | None = None
    while True:
        page = client.admin.tenants.list(limit=100, after=after)
        for tenant in page:
            if name_or_id in (tenant.id, tenant.name):
                return tenant.id
        if not page.has_more or page.last_id is None:
            return name_or_id
        after = page.last_id
