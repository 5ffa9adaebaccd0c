"""Connects to an engine, and asks it for one token, to see that it really computes.

The token is for `graftwork probe`, which is an engine's readiness probe on Kubernetes. A port that accepts connections, or
a process that lives, proves nothing: the device may be lost, or the loop stuck.
"""

import asyncio
import hashlib
from contextlib import aclosing
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING

from graftwork.api.server.tls import engine_tls
from graftwork.engine.core.client import EngineClient
from graftwork.engine.core.events import TokensGenerated
from graftwork.engine.core.progress import FreezeLimits
from graftwork.engine.core.requests import EngineRequest, ServiceTier
from graftwork.engine.core.sampling import SamplingParams
from graftwork.platform.errors import CapacityContended, DeadlineExceeded
from graftwork.platform.ids import IsolationDomain, RequestId, new_id
from graftwork.platform.settings.settings import Settings

if TYPE_CHECKING:
    from graftwork.engine.fleet.members import Connect

_DOMAIN = IsolationDomain(hashlib.sha256(b"graftwork probe").digest())
"""No tenant has this domain, so no tenant is charged, and no tenant's cache is read."""
_PROMPT = (0,)
"""A prompt that every vocabulary has."""


def engine_connection(settings: Settings) -> "Connect":
    """Returns a function that connects to the engine at an address, with the settings' token, limits and certificates.

    Raises InvalidRequest if the settings name certificates that are incomplete.
    """
    from graftwork.engine.rpc.client import GrpcEngineClient

    limits = FreezeLimits(settings.engine_silence_s, settings.step_timeout_s)
    tls = engine_tls(settings)
    return lambda address: GrpcEngineClient(address, limits, settings.engine_token, tls)


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """What an engine serves, and how long it took for one token."""

    model_name: str
    seconds: float
    is_busy: bool
    """Whether the engine refused the request, because its queue is full. It computes all the same, for others."""


async def probe_engine(settings: Settings, address: str, within_s: float) -> ProbeResult:
    """Connects to the engine at the gRPC target `address`, with the settings' token and certificates, and asks for one
    token in the priority tier.

    Raises DeadlineExceeded if there is no token in `within_s` seconds, and otherwise the engine's own error, for example
    Unavailable.
    """
    engine = engine_connection(settings)(address)
    try:
        async with asyncio.timeout(within_s):
            description = await engine.describe()
            started = perf_counter()
            is_busy = not await _gives_token(engine)
            return ProbeResult(description.model_name, perf_counter() - started, is_busy)
    except TimeoutError as error:
        raise DeadlineExceeded(
            f"The engine at {address} gave no token in {within_s:g} seconds: see its log, or allow more with --within."
        ) from error
    finally:
        await engine.close()


async def _gives_token(engine: EngineClient) -> bool:
    """Waits for one token. Returns False if the engine has too much to do to take the request."""
    request = EngineRequest(
        request_id=RequestId(new_id("req")),
        prompt_token_ids=_PROMPT,
        sampling=SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True),
        domain=_DOMAIN,
        tier=ServiceTier.PRIORITY,
    )
    try:
        async with aclosing(engine.generate(request)) as events:
            return any([isinstance(event, TokensGenerated) async for event in events])
    except CapacityContended:
        return False
