"""Reaches the server for the commands, and finds tenants by what people call them."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from graftwork.api.sdk.client import Graftwork


def connect(max_retries: int = 0) -> "Graftwork":
    """A client for GRAFTWORK_URL with the keys of the environment. A person at a prompt is told at once, not kept."""
    # httpx takes longer to load than all the rest of the program: `graftwork --help` does not wait for it.
    from graftwork.api.sdk.client import Graftwork

    return Graftwork(max_retries=max_retries)


def tenant_id_of(client: "Graftwork", name_or_id: str) -> str:
    """The id of a tenant given by its id or its name; what is neither is handed to the server, which will say so."""
    after: str | None = None
    while True:
        page = client.admin.tenants.list(limit=100, after=after)
        for tenant in page:
            if name_or_id in (tenant.id, tenant.name):
                return tenant.id
        if not page.has_more or page.last_id is None:
            return name_or_id
        after = page.last_id
