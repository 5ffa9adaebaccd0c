"""Protects an engine's address with a token: a secret that the engine and its gateways share.

A gateway sends the token with each call, and the engine refuses every call without it. The token is sent in the clear:
it keeps strangers out of a private network's port, and does not replace the private network.
"""

import hmac
from collections.abc import Awaitable, Callable
from ipaddress import ip_address
from typing import Any

import grpc
import grpc.aio

_HEADER = "authorization"


def call_metadata(token: str | None) -> tuple[tuple[str, str], ...]:
    """Returns the metadata that a gateway sends with each call."""
    return () if token is None else ((_HEADER, f"Bearer {token}"),)


def is_local(address: str) -> bool:
    """Returns whether only processes of this machine can reach the gRPC address `address`."""
    if address.startswith(("unix:", "unix-abstract:")):
        return True
    for scheme in ("dns:", "ipv4:", "ipv6:"):
        address = address.removeprefix(scheme)
    host = address.lstrip("/").rpartition(":")[0].strip("[]")
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


class TokenCheck(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # it takes none at run time
    """Refuses each call that does not bring the token."""

    def __init__(self, token: str) -> None:
        self._expected = f"Bearer {token}".encode()

    async def intercept_service(
        self,
        continuation: "Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]]",
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "grpc.RpcMethodHandler[Any, Any]":
        handler = await continuation(handler_call_details)
        presented = dict(handler_call_details.invocation_metadata).get(_HEADER, "")
        if hmac.compare_digest(str(presented).encode(), self._expected):
            return handler
        if handler is not None and handler.request_streaming:
            return grpc.stream_stream_rpc_method_handler(_refuse)
        return grpc.unary_unary_rpc_method_handler(_refuse)


async def _refuse(_: object, context: "grpc.aio.ServicerContext[Any, Any]") -> None:
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, "the engine's token is missing or wrong")
