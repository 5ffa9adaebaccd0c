"""Aliases of an adapter: what `name@alias` stands for."""

from typing import Any

from fastapi import APIRouter

from graftwork.api.dependencies import AdapterKey, AppResources
from graftwork.api.guarded_route import NativeRoute
from graftwork.api.schemas.adapters import AliasBody, alias_body

router = APIRouter(prefix="/v1/adapters/{name}/aliases", tags=["adapters"], route_class=NativeRoute)


@router.put("/{alias}")
async def set_alias(
    name: str, alias: str, body: AliasBody, resources: AppResources, principal: AdapterKey
) -> dict[str, Any]:
    """Point an alias at a version, or at several by weight, for all requests from now on."""
    return alias_body(await resources.registry.set_alias(principal.scope(), name, alias, body.target()))


@router.delete("/{alias}")
async def remove_alias(name: str, alias: str, resources: AppResources, principal: AdapterKey) -> dict[str, Any]:
    return alias_body(await resources.registry.remove_alias(principal.scope(), name, alias))
