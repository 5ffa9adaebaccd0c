"""A gateway with an identity provider: what the console's tests of people sign in at."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from graftwork.platform.clock import SystemClock
from graftwork.platform.ids import PersonId
from graftwork.platform.people.roles import parse_grant
from tests.api.console.browser import Browser
from tests.api.console.console_server import ConsoleServer, console_server
from tests.identity_provider import CONSOLE, IdentityProvider, listening_provider


@dataclass(frozen=True)
class Office:
    """The gateway and its provider."""

    server: ConsoleServer
    provider: IdentityProvider

    def person(self, subject: str, *roles: str) -> PersonId:
        """Adds a person with these roles."""
        people = self.server.resources.people.people
        person = self.server.run(people.add(self.provider.issuer, subject, None))
        for role in roles:
            self.server.run(people.grant(person.id, parse_grant(role)))
        return person.id

    def sign_in(self, browser: Browser, subject: str) -> None:
        """Signs a person in, and waits for the frame of the page."""
        self.provider.subject = subject
        browser.open(f"{self.server.url}/console")
        browser.find("#sign-in-with").click()
        browser.with_text("#who", f"{subject}@example.com")


@contextmanager
def open_office(folder: Path) -> Iterator[Office]:
    """Runs a provider, and a gateway with its data in `folder`."""
    with listening_provider(SystemClock().now) as provider:
        settings: dict[str, Any] = {
            "oidc_issuer": provider.issuer,
            "oidc_client_id": CONSOLE,
            "oidc_name": "Example <b>",
        }
        with console_server(folder, **settings) as server:
            yield Office(server, provider)
