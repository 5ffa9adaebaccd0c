"""`GET /v1/models`: the base model, then the tenant's adapters and their aliases."""

from typing import Any

from fastapi import APIRouter

from graftwork.adapters.format.specs import Adapter, ResolvedModel
from graftwork.api.deps.dependencies import AnyTenantKey, AppResources
from graftwork.api.deps.resources import Resources
from graftwork.api.deps.route_classes import OpenAiRoute
from graftwork.platform.pagination import Order, PageRequest
from graftwork.platform.tenancy.principals import Principal

router = APIRouter(prefix="/v1/models", tags=["models"], route_class=OpenAiRoute)


@router.get("")
async def list_models(resources: AppResources, principal: AnyTenantKey) -> dict[str, Any]:
    """Every name that this key may write as a `model`, the base model first."""
    data = [_base_body(resources)]
    for adapter in await _adapters(resources, principal):
        names = [adapter.name, *(f"{adapter.name}@{alias}" for alias in sorted(adapter.aliases))]
        data += [_adapter_body(name, adapter.created_at, resources) for name in names]
    ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]}
    return {"object": "list", "data": data, "has_more": False, **ends}


@router.get("/{model:path}")
async def get_model(model: str, resources: AppResources, principal: AnyTenantKey) -> dict[str, Any]:
    """One model by any form of its name, `name@3` too."""
    resolved: ResolvedModel = await resources.resolve(principal, model)
    if resolved.version is None:
        return _base_body(resources)
    return _adapter_body(model, resolved.version.created_at, resources) | {"root": resolved.label}


async def _adapters(resources: Resources, principal: Principal) -> list[Adapter]:
    """All that have a version, oldest first."""
    found: list[Adapter] = []
    request = PageRequest(limit=100, order=Order.ASCENDING)
    while True:
        page = await resources.registry.list(principal.scope(), request)
        found += page.items
        if not page.has_more:
            return [adapter for adapter in found if adapter.versions]
        request = PageRequest(limit=100, after=page.items[-1].id, order=Order.ASCENDING)


def _base_body(resources: Resources) -> dict[str, Any]:
    return _body(resources.base_name, 0, resources) | {"root": resources.base_name, "parent": None}


def _adapter_body(name: str, created_at: float, resources: Resources) -> dict[str, Any]:
    return _body(name, int(created_at), resources) | {"root": name, "parent": resources.base_name}


def _body(name: str, created: int, resources: Resources) -> dict[str, Any]:
    context_tokens = resources.description.context_tokens
    return {"id": name, "object": "model", "created": created, "owned_by": "graftwork", "max_model_len": context_tokens}
