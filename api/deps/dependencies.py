"""What handlers ask for by type: the process's resources, the request's id, and who is asking.

The principal is here because the route's class has authenticated it; these only hand it on and check its scopes.
"""

from collections.abc import Callable, Coroutine
from typing import Annotated, Any

from fastapi import Depends, Request

from graftwork.api.deps.resources import Resources, resources_of
from graftwork.platform.errors import InternalFailure
from graftwork.platform.ids import RequestId
from graftwork.platform.tenancy.principals import AdminPrincipal, Principal, Scope


async def _request_id(request: Request) -> RequestId:
    return RequestId(request.state.request_id)


async def _principal(request: Request) -> Principal:
    principal = request.state.principal
    if not isinstance(principal, Principal):
        raise InternalFailure("This route was declared without a tenant's guard.")
    return principal


async def _admin(request: Request) -> AdminPrincipal:
    principal = request.state.principal
    if not isinstance(principal, AdminPrincipal):
        raise InternalFailure("This route was declared without the operator's guard.")
    return principal


def _holder_of(scope: Scope) -> Callable[[Request], Coroutine[Any, Any, Principal]]:
    async def principal_with_scope(request: Request) -> Principal:
        principal = await _principal(request)
        principal.require(scope)
        return principal

    return principal_with_scope


AppResources = Annotated[Resources, Depends(resources_of)]
CurrentRequestId = Annotated[RequestId, Depends(_request_id)]
AnyTenantKey = Annotated[Principal, Depends(_principal)]
InferenceKey = Annotated[Principal, Depends(_holder_of(Scope.INFERENCE))]
AdapterKey = Annotated[Principal, Depends(_holder_of(Scope.ADAPTERS))]
UsageKey = Annotated[Principal, Depends(_holder_of(Scope.USAGE))]
Admin = Annotated[AdminPrincipal, Depends(_admin)]
