"""What requests leave behind: nothing that only the garbage collector could free."""

import asyncio
import gc
from collections import Counter
from typing import Any

import httpx
import pytest
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from graftwork.api.inference.job import InferenceJob
from graftwork.platform.errors import CapacityContended
from tests.api.fake_engine import BASE
from tests.api.gateway_on_port import gateway_on_port
from tests.api.in_process_gateway import Gateway

_TIMES = 3
_FORMS: tuple[dict[str, Any], ...] = ({}, {"stream": True}, {"n": 2}, {"stream": True, "n": 2})
_LOOKS = 50


def _alive() -> dict[int, str]:
    """Returns the types of the requests and jobs that are alive, by their identity: it must not keep them alive."""
    return {
        id(one): type(one).__name__ for one in gc.get_objects() if type(one) in (RequestResponseCycle, InferenceJob)
    }


async def _left(known: frozenset[int]) -> Counter[str]:
    """Returns which requests and jobs are alive after what was about to end has ended, but for those that were before."""
    for _ in range(_LOOKS):
        await asyncio.sleep(0)
        left = Counter(name for identity, name in _alive().items() if identity not in known)
        if not left:
            break
    return left


@pytest.mark.parametrize("refused", [False, True], ids=["answered", "refused"])
async def test_requests_leave_no_cycles(gateway: Gateway, refused: bool) -> None:
    """With the collector off, a request and its job are freed once they have ended and the connection is closed."""
    key = (await gateway.tenant()).key
    if refused:
        gateway.engine.refusal = CapacityContended("Full.", retry_after_s=1.0)
    body = {"model": BASE, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
    gc.collect()
    earlier = frozenset(_alive())  # what other tests of this process still hold
    gc.disable()
    try:
        async with gateway_on_port(gateway) as url:
            async with httpx.AsyncClient(base_url=url, headers={"authorization": f"Bearer {key}"}) as client:
                answers = [await client.post("/v1/chat/completions", json=body | form) for form in _FORMS * _TIMES]
            left = await _left(earlier)
    finally:
        gc.enable()

    assert {answer.status_code for answer in answers} == {429 if refused else 200}
    assert not left
