"""Defines the routes for the aliases of a tenant's adapters: targets, rollbacks, history and roll-outs."""

from typing import Annotated

from fastapi import APIRouter, Path

from graftwork.api.deps.resources import AdapterKey, AnyTenantKey, ForAccounts
from graftwork.api.deps.route_classes import NativeRoute
from graftwork.api.http.pagination import NumberPageQuery, PageQuery, list_answer, page_answer
from graftwork.api.openapi.declare import also
from graftwork.api.schemas.adapters import AliasBody, alias_answer, event_answer
from graftwork.api.schemas.rollouts import RolloutBody, rollout_answer
from graftwork.platform.answers.adapters import AliasChange, AliasEvent, Rollout
from graftwork.platform.answers.base import Page

router = APIRouter(prefix="/v1/adapters/{name}/aliases", tags=["adapters"], route_class=NativeRoute)

AliasPath = Annotated[str, Path(json_schema_extra={"pattern": r"^(?![0-9]+$)[a-z0-9][a-z0-9._-]{0,62}$"})]
"""An alias in a path. The pattern is only for the OpenAPI document, because the registry checks aliases itself."""


@router.put("/{alias}", responses=also(409))
async def set_alias(
    name: str, alias: AliasPath, body: AliasBody, resources: ForAccounts, principal: AdapterKey
) -> AliasChange:
    """Point an alias at one version, or at several versions with weights.

    With weights, a session, else the `user` of the request, else the key always gets the same version.
    """
    principal.require_models([name], "name")
    aliases = resources.registry.aliases
    return alias_answer(await aliases.set(principal.scope(), name, alias, body.target(), actor=principal.actor))


@router.delete("/{alias}")
async def remove_alias(name: str, alias: AliasPath, resources: ForAccounts, principal: AdapterKey) -> AliasChange:
    principal.require_models([name], "name")
    aliases = resources.registry.aliases
    return alias_answer(await aliases.remove(principal.scope(), name, alias, actor=principal.actor))


@router.post("/{alias}/rollback", responses=also(409))
async def roll_back_alias(name: str, alias: AliasPath, resources: ForAccounts, principal: AdapterKey) -> AliasChange:
    """Give an alias the target that it had before. A second rollback goes back one target more."""
    principal.require_models([name], "name")
    aliases = resources.registry.aliases
    return alias_answer(await aliases.roll_back(principal.scope(), name, alias, actor=principal.actor))


@router.get("/{alias}/history")
async def list_alias_events(
    name: str, alias: AliasPath, resources: ForAccounts, principal: AnyTenantKey, page: NumberPageQuery
) -> Page[AliasEvent]:
    """List the changes of an alias: its targets, when each was set, and by which key. The newest comes first."""
    principal.require_models([name], "name")
    return page_answer(await resources.registry.aliases.history(principal.scope(), name, alias, page), event_answer)


rollouts_router = APIRouter(prefix="/v1/adapters/{name}/rollouts", tags=["adapters"], route_class=NativeRoute)


@rollouts_router.post("", status_code=201, responses=also(409))
async def create_rollout(name: str, body: RolloutBody, resources: ForAccounts, principal: AdapterKey) -> Rollout:
    """Start a roll-out. The alias leads to the new version with the weight of the first step at once.

    If the new version breaks a limit, the server rolls it back by itself.
    """
    principal.require_models([name], "name")
    rollouts = resources.registry.rollouts
    return rollout_answer(await rollouts.start(principal.scope(), name, body.new(), actor=principal.actor), {})


@rollouts_router.get("")
async def list_rollouts(name: str, resources: ForAccounts, principal: AnyTenantKey, page: PageQuery) -> Page[Rollout]:
    principal.require_models([name], "name")
    found = await resources.registry.rollouts.list(principal.scope(), name, page)
    return list_answer([rollout_answer(*each) for each in found.items], has_more=found.has_more)


@rollouts_router.get("/{rollout_id}")
async def get_rollout(name: str, rollout_id: str, resources: ForAccounts, principal: AnyTenantKey) -> Rollout:
    """Get a roll-out, with the figures of its present step."""
    principal.require_models([name], "name")
    return rollout_answer(*await resources.registry.rollouts.get(principal.scope(), name, rollout_id))


@rollouts_router.post("/{rollout_id}/cancel", responses=also(409))
async def cancel_rollout(name: str, rollout_id: str, resources: ForAccounts, principal: AdapterKey) -> Rollout:
    """Cancel a roll-out. The alias leads to the stable version again."""
    principal.require_models([name], "name")
    rollouts = resources.registry.rollouts
    return rollout_answer(await rollouts.cancel(principal.scope(), name, rollout_id, actor=principal.actor), {})
