"""Defines the operator's routes for the webhooks that get alerts of budgets."""

import json
from typing import Annotated

from fastapi import APIRouter
from pydantic import Field

from graftwork.api.deps.resources import Admin, ForAdmin
from graftwork.api.deps.route_classes import AdminRoute
from graftwork.api.schemas.base import NativeBody
from graftwork.platform.alerts.repository import Webhook
from graftwork.platform.answers import admin as answers
from graftwork.platform.answers.base import Deleted
from graftwork.platform.ids import OrganisationId, TenantId
from graftwork.platform.outbound.public_addresses import MAX_URL_CHARACTERS
from graftwork.platform.tenancy.limit_book import LimitOwner


class WebhookRoute(AdminRoute):
    """An operator's route that can return a new secret. The server never stores it with the answer."""

    def storable_body(self, body: bytes) -> bytes:
        return json.dumps(json.loads(body) | {"secret": None}).encode()


router = APIRouter(prefix="/v1/admin", tags=["admin"], route_class=WebhookRoute)


class WebhookBody(NativeBody):
    """The body of a request that sets a webhook."""

    url: Annotated[str, Field(min_length=1, max_length=MAX_URL_CHARACTERS)]
    """An http or https address. It must lead to public addresses, unless the operator allows others."""


@router.get("/organisations/{organisation_id}/webhook")
async def get_organisation_webhook(organisation_id: str, resources: ForAdmin, _: Admin) -> answers.Webhook:
    """Get the webhook that gets the alerts of an organisation, and of its tenants without webhooks of their own."""
    return _answer(await resources.webhooks.get(LimitOwner.organisation(OrganisationId(organisation_id))))


@router.put("/organisations/{organisation_id}/webhook")
async def set_organisation_webhook(
    organisation_id: str, body: WebhookBody, resources: ForAdmin, admin: Admin
) -> answers.Webhook:
    """Set or replace the webhook of an organisation. Only this answer contains `secret`, a new one each time."""
    owner = LimitOwner.organisation(OrganisationId(organisation_id))
    return _answer(*await resources.webhooks.set(owner, body.url, actor=admin.name))


@router.delete("/organisations/{organisation_id}/webhook")
async def delete_organisation_webhook(organisation_id: str, resources: ForAdmin, admin: Admin) -> Deleted:
    await resources.webhooks.delete(LimitOwner.organisation(OrganisationId(organisation_id)), actor=admin.name)
    return Deleted(id=organisation_id, object="webhook.deleted")


@router.get("/tenants/{tenant_id}/webhook")
async def get_tenant_webhook(tenant_id: str, resources: ForAdmin, _: Admin) -> answers.Webhook:
    """Get the webhook that gets the alerts of a tenant, its keys and its end users."""
    return _answer(await resources.webhooks.get(LimitOwner.tenant(TenantId(tenant_id))))


@router.put("/tenants/{tenant_id}/webhook")
async def set_tenant_webhook(tenant_id: str, body: WebhookBody, resources: ForAdmin, admin: Admin) -> answers.Webhook:
    """Set or replace the webhook of a tenant. Only this answer contains `secret`, a new one each time."""
    owner = LimitOwner.tenant(TenantId(tenant_id))
    return _answer(*await resources.webhooks.set(owner, body.url, actor=admin.name))


@router.delete("/tenants/{tenant_id}/webhook")
async def delete_tenant_webhook(tenant_id: str, resources: ForAdmin, admin: Admin) -> Deleted:
    await resources.webhooks.delete(LimitOwner.tenant(TenantId(tenant_id)), actor=admin.name)
    return Deleted(id=tenant_id, object="webhook.deleted")


def _answer(webhook: Webhook, secret: str | None = None) -> answers.Webhook:
    return answers.Webhook(
        id=webhook.webhook_id,
        owner_id=webhook.owner_id,
        url=webhook.url,
        created_at=int(webhook.created_at),
        secret=secret,
    )
