"""Defines the routes for a tenant's adapters and their aliases."""

import asyncio
from typing import Annotated

from fastapi import APIRouter, File, Form, Path, UploadFile

from graftwork.adapters.inspection.adapter_files import AdapterFiles
from graftwork.api.deps.resources import AccountResources, AdapterKey, AnyTenantKey, ForAccounts
from graftwork.api.deps.route_classes import NativeRoute, UploadRoute
from graftwork.api.http.pagination import PageQuery, page_answer
from graftwork.api.openapi.declare import also
from graftwork.api.schemas.adapters import AliasBody, adapter_answer, alias_answer
from graftwork.platform.answers.adapters import Adapter, AdapterDeleted, AliasChange, VersionDeleted
from graftwork.platform.answers.base import Page
from graftwork.platform.tenancy.principals import Principal

router = APIRouter(prefix="/v1/adapters", tags=["adapters"], route_class=NativeRoute)
uploads_router = APIRouter(prefix="/v1/adapters", tags=["adapters"], route_class=UploadRoute)


VersionPath = Annotated[int, Path(ge=1, lt=10**9)]
AliasPath = Annotated[str, Path(json_schema_extra={"pattern": r"^(?![0-9]+$)[a-z0-9][a-z0-9._-]{0,62}$"})]
"""An alias in a path. The pattern is only for the OpenAPI document, because the registry checks aliases itself."""


@uploads_router.post("", status_code=201, responses=also(408, 429))
async def create_adapter(
    name: Annotated[str, Form(description="The adapter's name.")],
    config: Annotated[UploadFile, File(description="adapter_config.json")],
    weights: Annotated[UploadFile, File(description="adapter_model.safetensors")],
    resources: ForAccounts,
    principal: AdapterKey,
) -> Adapter:
    """Upload an adapter. An existing adapter with this name gets a new version. The server checks the files at once."""
    return await _publish(name, config, weights, resources, principal)


@uploads_router.post("/{name}/versions", status_code=201, responses=also(408, 429))
async def create_version(
    name: str,
    config: Annotated[UploadFile, File(description="adapter_config.json")],
    weights: Annotated[UploadFile, File(description="adapter_model.safetensors")],
    resources: ForAccounts,
    principal: AdapterKey,
) -> Adapter:
    """Upload a new version of an adapter. If a version already has the same files, the server makes no new version."""
    await resources.registry.get(principal.scope(), name)
    return await _publish(name, config, weights, resources, principal)


@router.get("", responses=also(404))
async def list_adapters(resources: ForAccounts, principal: AnyTenantKey, page: PageQuery) -> Page[Adapter]:
    return page_answer(await resources.registry.list(principal.scope(), page), adapter_answer)


@router.get("/{name}")
async def get_adapter(name: str, resources: ForAccounts, principal: AnyTenantKey) -> Adapter:
    return adapter_answer(await resources.registry.get(principal.scope(), name))


@router.delete("/{name}")
async def delete_adapter(name: str, resources: ForAccounts, principal: AdapterKey) -> AdapterDeleted:
    """Delete an adapter. Running requests still finish. New requests get a 404."""
    adapter = await resources.registry.get(principal.scope(), name)
    await resources.registry.delete(principal.scope(), name)
    return AdapterDeleted(id=adapter.id, name=name)


@router.delete("/{name}/versions/{version}", responses=also(409))
async def delete_version(
    name: str, version: VersionPath, resources: ForAccounts, principal: AdapterKey
) -> VersionDeleted:
    await resources.registry.delete_version(principal.scope(), name, version)
    return VersionDeleted(name=name, version=version)


async def _publish(
    name: str, config: UploadFile, weights: UploadFile, resources: AccountResources, principal: Principal
) -> Adapter:
    """Publishes the files as a version of the adapter. The file names in the upload have no effect."""
    quota = await resources.tenancy.get_quota(principal.tenant_id)
    files = await asyncio.to_thread(AdapterFiles.read, config.file, weights.file)
    adapter = await resources.registry.publish(principal.scope(), name, files, resources.description, quota)
    return adapter_answer(adapter)


aliases_router = APIRouter(prefix="/v1/adapters/{name}/aliases", tags=["adapters"], route_class=NativeRoute)


@aliases_router.put("/{alias}")
async def set_alias(
    name: str, alias: AliasPath, body: AliasBody, resources: ForAccounts, principal: AdapterKey
) -> AliasChange:
    """Point an alias at one version, or at several versions with weights."""
    return alias_answer(await resources.registry.set_alias(principal.scope(), name, alias, body.target()))


@aliases_router.delete("/{alias}")
async def remove_alias(name: str, alias: AliasPath, resources: ForAccounts, principal: AdapterKey) -> AliasChange:
    return alias_answer(await resources.registry.remove_alias(principal.scope(), name, alias))
