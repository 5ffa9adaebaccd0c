"""A client that has the web console's cookie instead of a key, as the console's page does."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import httpx

from tests.api.in_process_gateway import Gateway

CSRF = "x-graftwork-csrf"


@asynccontextmanager
async def signed_in(gateway: Gateway, key: str) -> AsyncGenerator[httpx.AsyncClient]:
    """Signs in with the key. The client sends the cookie, and the token that changes need."""
    transport = httpx.ASGITransport(app=gateway.app)
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway.test") as browser:
        answer = await browser.post("/console/session", headers={"authorization": f"Bearer {key}"})
        assert answer.status_code == 201, answer.text
        browser.headers[CSRF] = answer.json()["csrf_token"]
        yield browser
