"""A client that has the web console's cookie instead of a key, as the console's page does."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import httpx

from tests.api.in_process_gateway import Gateway

CSRF = "x-graftwork-csrf"


async def sign_in(client: httpx.AsyncClient) -> None:
    """Gives the client the cookie and the token that changes need, and takes its key away."""
    answer = await client.post("/console/session")
    assert answer.status_code == 201, answer.text
    del client.headers["authorization"]
    client.headers[CSRF] = answer.json()["csrf_token"]


@asynccontextmanager
async def signed_in(gateway: Gateway, key: str) -> AsyncGenerator[httpx.AsyncClient]:
    """A new client that has signed in with the key."""
    async with gateway.client(key) as browser:
        await sign_in(browser)
        yield browser
