"""Defines the routes that list the models: the base model, and the tenant's adapters with their aliases.

The answers have OpenAI's form, or Anthropic's form for a request with the header `anthropic-version`.
"""

from fastapi import APIRouter

from graftwork.adapters.format.specs import Adapter
from graftwork.api.anthropic.models import AnthropicModelPage, IsAnthropicClient, model_info, model_info_page
from graftwork.api.deps.resources import AnyTenantKey, ForInference, InferenceResources
from graftwork.api.deps.route_classes import OpenAiRoute
from graftwork.api.http.pagination import list_answer
from graftwork.platform.answers.base import Page
from graftwork.platform.answers.models import Model, ModelInfo, ModelInfoPage
from graftwork.platform.keys.scopes import allows_model
from graftwork.platform.pagination import Order, PageRequest
from graftwork.platform.tenancy.principals import Principal

router = APIRouter(prefix="/v1/models", tags=["models"], route_class=OpenAiRoute)


@router.get("")
async def list_models(
    resources: ForInference, principal: AnyTenantKey, page: AnthropicModelPage
) -> Page[Model] | ModelInfoPage:
    """List the names that a request with this key can send as `model`. The base model comes first.

    With the header `anthropic-version`, the answer has the form of Anthropic's API.
    """
    models = [_base_model(resources)] if allows_model(principal.adapters, resources.base_name) else []
    for adapter in await _adapters(resources, principal):
        names = [adapter.name, *(f"{adapter.name}@{alias}" for alias in sorted(adapter.aliases))]
        models += [_adapter_model(name, name, adapter.created_at, resources) for name in names]
    return list_answer(models) if page is None else model_info_page(models, page)


@router.get("/{model:path}")
async def get_model(
    model: str, resources: ForInference, principal: AnyTenantKey, is_anthropic: IsAnthropicClient
) -> Model | ModelInfo:
    """Get one model by name: the base model, or an adapter as `name`, `name@3` or `name@alias`.

    With the header `anthropic-version`, the answer has the form of Anthropic's API.
    """
    resolved = await resources.resolve(principal, model)
    found = _base_model(resources)
    if resolved.version is not None:
        found = _adapter_model(model, resolved.label, resolved.version.created_at, resources)
    return model_info(found) if is_anthropic else found


async def _adapters(resources: InferenceResources, principal: Principal) -> list[Adapter]:
    """Returns all adapters of the tenant that have a version and that the key allows, the oldest adapter first."""
    found: list[Adapter] = []
    request = PageRequest(limit=100, order=Order.ASCENDING)
    while True:
        page = await resources.registry.list(principal.scope(), request)
        found += page.items
        if not page.has_more:
            return [one for one in found if one.versions and allows_model(principal.adapters, one.name)]
        request = PageRequest(limit=100, after=page.items[-1].id, order=Order.ASCENDING)


def _base_model(resources: InferenceResources) -> Model:
    return _model(resources.base_name, resources.base_name, None, 0, resources)


def _adapter_model(name: str, root: str, created_at: float, resources: InferenceResources) -> Model:
    return _model(name, root, resources.base_name, int(created_at), resources)


def _model(name: str, root: str, parent: str | None, created: int, resources: InferenceResources) -> Model:
    return Model(
        id=name,
        created=created,
        owned_by="graftwork",
        max_model_len=resources.description.context_tokens,
        root=root,
        parent=parent,
    )
