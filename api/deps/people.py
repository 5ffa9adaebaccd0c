"""Groups the services that the routes for people and their sign-ins use."""

from dataclasses import dataclass

from graftwork.platform.clock import Clock
from graftwork.platform.errors import NotFound
from graftwork.platform.oidc.code_flow import CodeFlow
from graftwork.platform.oidc.id_tokens import IdTokens
from graftwork.platform.people.people import People
from graftwork.platform.people.sign_in import SignIns
from graftwork.platform.settings.settings import Settings


@dataclass(frozen=True, slots=True)
class SignInProvider:
    """The identity provider of the settings, and how people sign in with it."""

    code_flow: CodeFlow
    id_tokens: IdTokens


@dataclass(frozen=True, slots=True)
class PeopleResources:
    """The services that the routes for people and their sign-ins use."""

    settings: Settings
    clock: Clock
    people: People
    sign_ins: SignIns
    provider: SignInProvider | None = None
    """None without an identity provider; then only keys sign in."""

    def required_provider(self) -> SignInProvider:
        """Returns the identity provider. Raises NotFound without one."""
        if self.provider is None:
            message = "This server has no identity provider: set oidc_issuer and oidc_client_id, or use a key."
            raise NotFound(message, code="no_oidc_provider")
        return self.provider
