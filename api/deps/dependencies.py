"""Defines the types of handler parameters: a group of resources, the request's id, or the principal.

FastAPI fills in a parameter by its type. The route's class has already authenticated the principal. This module only
checks the principal's scopes.
"""

from collections.abc import Callable, Coroutine
from operator import attrgetter
from typing import Annotated, Any

from fastapi import Depends, Request

from graftwork.api.deps.resources import (
    AccountResources,
    AdminResources,
    InferenceResources,
    Resources,
    ServerResources,
    SessionResources,
    resources_of,
)
from graftwork.platform.errors import InternalFailure
from graftwork.platform.ids import RequestId
from graftwork.platform.tenancy.principals import AdminPrincipal, Principal, Scope


async def _request_id(request: Request) -> RequestId:
    return RequestId(request.state.request_id)


async def _principal(request: Request) -> Principal:
    principal = request.state.principal
    if not isinstance(principal, Principal):
        raise InternalFailure("This route was declared without a tenant's route class.")
    return principal


async def _admin(request: Request) -> AdminPrincipal:
    principal = request.state.principal
    if not isinstance(principal, AdminPrincipal):
        raise InternalFailure("This route was declared without the operator's route class.")
    return principal


def _group(choose: Callable[[Resources], Any]) -> Callable[[Request], Coroutine[Any, Any, Any]]:
    async def group_of(request: Request) -> Any:
        return choose(resources_of(request))

    return group_of


def _holder_of(scope: Scope) -> Callable[[Request], Coroutine[Any, Any, Principal]]:
    async def principal_with_scope(request: Request) -> Principal:
        principal = await _principal(request)
        principal.require(scope)
        return principal

    return principal_with_scope


ForInference = Annotated[InferenceResources, Depends(_group(attrgetter("inference")))]
ForSessions = Annotated[SessionResources, Depends(_group(attrgetter("sessions")))]
ForAccounts = Annotated[AccountResources, Depends(_group(attrgetter("account")))]
ForAdmin = Annotated[AdminResources, Depends(_group(attrgetter("admin")))]
ForServer = Annotated[ServerResources, Depends(_group(attrgetter("server")))]
CurrentRequestId = Annotated[RequestId, Depends(_request_id)]
AnyTenantKey = Annotated[Principal, Depends(_principal)]
InferenceKey = Annotated[Principal, Depends(_holder_of(Scope.INFERENCE))]
AdapterKey = Annotated[Principal, Depends(_holder_of(Scope.ADAPTERS))]
UsageKey = Annotated[Principal, Depends(_holder_of(Scope.USAGE))]
Admin = Annotated[AdminPrincipal, Depends(_admin)]
