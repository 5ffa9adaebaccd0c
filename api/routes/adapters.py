"""Defines the routes for a tenant's adapters."""

import asyncio
from dataclasses import replace
from typing import Annotated, Literal

from fastapi import APIRouter, Depends, File, Form, Path, Query, UploadFile

from graftwork.adapters.format.specs import Provenance
from graftwork.adapters.inspection.adapter_files import AdapterFiles
from graftwork.adapters.inspection.upload import Push
from graftwork.adapters.registry.details import MAX_TAGS
from graftwork.adapters.registry.repository import AdapterFilter
from graftwork.api.deps.resources import AccountResources, AdapterKey, AnyTenantKey, ForAccounts, ForInference
from graftwork.api.deps.route_classes import NativeRoute, UploadRoute
from graftwork.api.http.pagination import PageQuery, page_answer
from graftwork.api.openapi.declare import also
from graftwork.api.schemas.adapters import AdapterPatch, TagText, adapter_answer
from graftwork.platform.answers.adapters import Adapter, AdapterDeleted, VersionDeleted
from graftwork.platform.answers.base import Page
from graftwork.platform.keys.scopes import allows_model
from graftwork.platform.quotas.limits import end_user_id
from graftwork.platform.tenancy.limit_book import MAX_USER_CHARACTERS
from graftwork.platform.tenancy.principals import Principal
from graftwork.sessions.generation.constraints import OutputConstraints, ResponseFormatFields

router = APIRouter(prefix="/v1/adapters", tags=["adapters"], route_class=NativeRoute)
uploads_router = APIRouter(prefix="/v1/adapters", tags=["adapters"], route_class=UploadRoute)


VersionPath = Annotated[int, Path(ge=1, lt=10**9)]
Promoted = Annotated[
    bool,
    Form(description="False keeps the version from being what the adapter's plain name stands for."),
]
RunText = Annotated[
    str | None, Form(max_length=200, description="The training run that made the version, as an id or an address.")
]
ParentText = Annotated[
    str | None, Form(max_length=80, description="The version from which it was trained, such as `support@3`.")
]
DataDigest = Annotated[
    str | None, Form(pattern="^sha256:[0-9a-f]{64}$", description="The digest of the training data, `sha256:…`.")
]
UserText = Annotated[
    str | None,
    Form(
        min_length=1, max_length=MAX_USER_CHARACTERS, description="The end user in whose limit of adapters it counts."
    ),
]


async def _push(
    principal: AdapterKey,
    promote: Promoted = True,
    run: RunText = None,
    parent: ParentText = None,
    data_digest: DataDigest = None,
    user: UserText = None,
) -> Push:
    origin = Provenance(None, run or None, parent or None, data_digest)
    end_user = end_user_id(principal.tenant_id, user)
    return Push(principal.actor, not promote, origin, key_id=principal.limits_id, end_user_id=end_user)


PushFields = Annotated[Push, Depends(_push)]


async def _filter(
    tag: Annotated[list[TagText] | None, Query(max_length=MAX_TAGS)] = None,
    name: Annotated[str | None, Query(pattern="^[a-z0-9._-]{1,63}$")] = None,
    base: Annotated[str | None, Query(pattern="^[!-~]{1,80}$")] = None,
    state: Annotated[Literal["ready", "deleted"], Query()] = "ready",
) -> AdapterFilter:
    return AdapterFilter(tuple(tag or ()), name, base, state == "deleted")


Erase = Annotated[bool, Query(description="True erases at once: nothing can be restored.")]


@uploads_router.post("", status_code=201, responses=also(408, 409, 429))
async def create_adapter(
    name: Annotated[str, Form(description="The adapter's name.")],
    config: Annotated[UploadFile, File(description="adapter_config.json")],
    weights: Annotated[UploadFile, File(description="adapter_model.safetensors")],
    resources: ForAccounts,
    principal: AdapterKey,
    push: PushFields,
) -> Adapter:
    """Upload an adapter. An existing adapter with this name gets a new version. The server checks the files at once."""
    return await _publish(name, (config, weights), push, resources, principal)


@uploads_router.post("/{name}/versions", status_code=201, responses=also(408, 409, 429))
async def create_version(
    name: str,
    config: Annotated[UploadFile, File(description="adapter_config.json")],
    weights: Annotated[UploadFile, File(description="adapter_model.safetensors")],
    resources: ForAccounts,
    principal: AdapterKey,
    push: PushFields,
) -> Adapter:
    """Upload a new version of an adapter. If a version already has the same files, the server makes no new version."""
    principal.require_models([name], "name")
    await resources.registry.get(principal.scope(), name)
    return await _publish(name, (config, weights), push, resources, principal)


@router.get("", responses=also(404))
async def list_adapters(
    resources: ForAccounts,
    principal: AnyTenantKey,
    page: PageQuery,
    wanted: Annotated[AdapterFilter, Depends(_filter)],
) -> Page[Adapter]:
    """List the adapters that the key allows: with all of the given tags, with a text in their names, made for a base, or
    deleted. A page can have fewer than `limit` of them, or none, and more can follow.
    """
    found = await resources.registry.list(principal.scope(), page, wanted)
    allowed = tuple(adapter for adapter in found.items if allows_model(principal.adapters, adapter.name))
    return page_answer(replace(found, items=allowed), adapter_answer)


@router.get("/{name}")
async def get_adapter(name: str, resources: ForAccounts, principal: AnyTenantKey) -> Adapter:
    principal.require_models([name], "name")
    return adapter_answer(await resources.registry.get(principal.scope(), name))


@router.patch("/{name}")
async def change_adapter(
    name: str, body: AdapterPatch, resources: ForAccounts, inference: ForInference, principal: AdapterKey
) -> Adapter:
    """Change an adapter's tags, or the defaults of its requests. Each replaces what was there."""
    principal.require_models([name], "name")
    change = body.change()
    if change.defaults is not None:
        checked = OutputConstraints(
            tools=change.defaults.tools,
            response_format=ResponseFormatFields(change.defaults.response_format),
        )
        await inference.planner.of(principal.tenant_id).plan_off_loop(checked)
    details = resources.registry.details
    return adapter_answer(await details.change(principal.scope(), name, change, actor=principal.actor))


@router.delete("/{name}")
async def delete_adapter(
    name: str, resources: ForAccounts, principal: AdapterKey, erase: Erase = False
) -> AdapterDeleted:
    """Delete an adapter. Running requests still finish. New requests get a 404. It can be restored for a time."""
    principal.require_models([name], "name")
    adapter = await resources.registry.get(principal.scope(), name, deleted_too=erase)
    await resources.registry.deletions.delete(principal.scope(), name, erase=erase, actor=principal.actor)
    return AdapterDeleted(id=adapter.id, name=name)


@router.post("/{name}/restore")
async def restore_adapter(name: str, resources: ForAccounts, principal: AdapterKey) -> Adapter:
    """Restore an adapter that was deleted, with its versions and aliases."""
    principal.require_models([name], "name")
    deletions = resources.registry.deletions
    return adapter_answer(await deletions.restore(principal.scope(), name, actor=principal.actor))


@router.delete("/{name}/versions/{version}", responses=also(409))
async def delete_version(
    name: str, version: VersionPath, resources: ForAccounts, principal: AdapterKey, erase: Erase = False
) -> VersionDeleted:
    """Delete one version of an adapter. It can be restored for a time."""
    principal.require_models([name], "name")
    deletions = resources.registry.deletions
    await deletions.delete_version(principal.scope(), name, version, erase=erase, actor=principal.actor)
    return VersionDeleted(name=name, version=version)


@router.post("/{name}/versions/{version}/restore")
async def restore_version(name: str, version: VersionPath, resources: ForAccounts, principal: AdapterKey) -> Adapter:
    """Restore a version that was deleted."""
    principal.require_models([name], "name")
    deletions = resources.registry.deletions
    return adapter_answer(await deletions.restore_version(principal.scope(), name, version, actor=principal.actor))


async def _publish(
    name: str,
    uploaded: tuple[UploadFile, UploadFile],
    push: Push,
    resources: AccountResources,
    principal: Principal,
) -> Adapter:
    """Publishes the files as a version of the adapter. The file names in the upload have no effect."""
    principal.require_models([name], "name")
    quota = await resources.tenancy.limits.of_tenant(principal.tenant_id)
    files = await asyncio.to_thread(AdapterFiles.read, *(part.file for part in uploaded))
    published = await resources.registry.publish(principal.scope(), name, files, resources.description, quota, push)
    return adapter_answer(published.adapter)
