"""Sends one signed alert to one webhook.

Owns the request: where it connects, how long it may take, and what its answer means. Never retries: the outbox does.
Follows no redirect, uses no proxy of the environment, and reads no body.
"""

import asyncio
import json
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import httpx

from graftwork.platform.alerts.signing import SIGNATURE_HEADER, sign
from graftwork.platform.clock import Clock
from graftwork.platform.errors import ValidationFailed
from graftwork.platform.outbound.public_addresses import (
    InwardAddress,
    Resolve,
    UnknownHost,
    find_destination,
    resolve_host,
)

SEND_WITHIN_S = 10.0


class Verdict(StrEnum):
    """What became of one attempt."""

    DELIVERED = "delivered"
    RETRY = "retry"
    REFUSED = "refused"
    """The webhook leads to an inner address or redirects. Another attempt would do the same."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """The result of one attempt."""

    verdict: Verdict
    reason: str = ""


class AlertSender:
    """Sends alerts over HTTP."""

    def __init__(
        self,
        clock: Clock,
        allowed_networks: tuple[str, ...] = (),
        *,
        resolve: Resolve = resolve_host,
        within_s: float = SEND_WITHIN_S,
        trusted: ssl.SSLContext | None = None,
    ) -> None:
        """`allowed_networks` are inner networks that webhooks may lead to. An attempt ends after `within_s` seconds.

        `trusted` has the authorities whose certificates are accepted; None means the usual ones.
        """
        self._clock = clock
        self._allowed_networks = allowed_networks
        self._resolve = resolve
        self._within_s = within_s
        self._trusted = trusted

    async def send(self, url: str, secret: str, payload: Mapping[str, Any]) -> Attempt:
        """Sends an alert once. Never raises for what the receiver does."""
        body = json.dumps(payload, separators=(",", ":")).encode()
        headers = {
            "content-type": "application/json",
            "user-agent": "graftwork-webhooks",
            SIGNATURE_HEADER: sign(secret, body, self._clock.now()),
        }
        try:
            async with asyncio.timeout(self._within_s):
                return await self._post(url, body, headers)
        except InwardAddress as error:
            return Attempt(Verdict.REFUSED, str(error))
        except ValidationFailed as error:
            return Attempt(Verdict.REFUSED, error.message)
        except TimeoutError:
            return Attempt(Verdict.RETRY, f"no answer within {self._within_s:g} s")
        except (UnknownHost, httpx.HTTPError, httpx.InvalidURL, OSError) as error:
            return Attempt(Verdict.RETRY, f"{type(error).__name__}: {error}")

    async def _post(self, url: str, body: bytes, headers: Mapping[str, str]) -> Attempt:
        destination = await find_destination(url, self._allowed_networks, self._resolve)
        if destination.url.startswith("https:") and self._trusted is None:
            self._trusted = await asyncio.to_thread(ssl.create_default_context)  # it reads hundreds of certificates
        verify = self._trusted or False  # False is never used: without TLS there is no certificate
        async with httpx.AsyncClient(
            follow_redirects=False, trust_env=False, timeout=self._within_s, verify=verify
        ) as client:
            request = client.build_request(
                "POST",
                destination.url,
                content=body,
                headers={**headers, "host": destination.host},
                extensions={"sni_hostname": destination.server_name},
            )
            response = await client.send(request, stream=True)
            await response.aclose()
        if response.is_redirect or 300 <= response.status_code < 400:
            return Attempt(Verdict.REFUSED, f"it redirects (HTTP {response.status_code})")
        if response.is_success:
            return Attempt(Verdict.DELIVERED)
        return Attempt(Verdict.RETRY, f"HTTP {response.status_code}")
