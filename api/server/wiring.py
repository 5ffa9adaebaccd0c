"""Builds one gateway's resources at start, and closes them in reverse order at the end.

Owns the order in which services start. Never handles a request.
Before the gateway serves, this module upgrades the database to the schema of this code, and ends the turns that a crash
left running.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial

from graftwork.adapters.inspection.inspector import AdapterInspector
from graftwork.adapters.registry.registry import AdapterRegistry
from graftwork.adapters.registry.rollout_controller import TICK_S, RolloutController
from graftwork.api.batches.assembly import FILES_FOLDER, batch_resources, running_batches
from graftwork.api.deps.background import ServerTasks, repeating
from graftwork.api.deps.limit_use import LimitUse
from graftwork.api.deps.resources import (
    AccountResources,
    AdminResources,
    InferenceResources,
    Resources,
    ServerResources,
    SessionResources,
)
from graftwork.api.overview.board import OverviewBoard
from graftwork.api.overview.directory import OwnerDirectory
from graftwork.api.overview.engines import EngineBoard
from graftwork.api.people.assembly import people_resources
from graftwork.api.rights.assembly import EXPORTS_FOLDER, making_exports, rights_resources
from graftwork.api.server.engine_process import artifact_store
from graftwork.api.server.erasing import SWEEP_S, open_sweeps, tenant_erasure
from graftwork.api.server.fleets import connect_engine, replica_directory
from graftwork.api.server.foundation import Foundation, ServedModel, open_ledger, read_served_model
from graftwork.api.server.model_sources import hub_address
from graftwork.api.server.tracing import open_tracing
from graftwork.api.uploads.assembly import running_fetches, upload_keeper
from graftwork.engine.core.client import EngineClient
from graftwork.platform.activity.meter import ActivityMeter
from graftwork.platform.alerts.budget_alerts import DELIVER_S, WATCH_S, BudgetAlerts
from graftwork.platform.alerts.sender import AlertSender
from graftwork.platform.alerts.webhooks import Webhooks
from graftwork.platform.clock import Clock, SystemClock
from graftwork.platform.data_folder import prepare_data_folder
from graftwork.platform.database import Database
from graftwork.platform.encryption.row_keys import encrypt_rows
from graftwork.platform.encryption.tenant_keys import open_tenant_keys
from graftwork.platform.gateways.lease import GatewayLease, owner_name
from graftwork.platform.ids import new_id
from graftwork.platform.json_worker import JsonParsing
from graftwork.platform.ledger.backlog import UsageBacklog
from graftwork.platform.ledger.journal import UsageJournal
from graftwork.platform.ledger.meter import UsageMeter
from graftwork.platform.ledger.price_keeper import PRICES_S, PriceKeeper
from graftwork.platform.modes.modes import REFRESH_S, ModeSwitch
from graftwork.platform.objectives import ObjectiveMeter
from graftwork.platform.people.operators import Operators
from graftwork.platform.quotas.in_flight import InFlightBound
from graftwork.platform.quotas.quotas import QuotaKeeper, open_quotas
from graftwork.platform.quotas.uploads import UploadBound
from graftwork.platform.settings.settings import Settings
from graftwork.platform.telemetry import Telemetry
from graftwork.platform.tenancy.authenticator import AdminKey, Authenticator
from graftwork.platform.tenancy.erasure import TenantErasure
from graftwork.platform.tenancy.idempotency import IdempotencyStore
from graftwork.platform.tenancy.key_holders import FLUSH_USES_S
from graftwork.platform.tenancy.principals import AccessWatch, RunningWork
from graftwork.platform.tenancy.secret_files import load_admin_key, load_pepper
from graftwork.platform.tenancy.tenancy import Tenancy
from graftwork.platform.tenancy.verified_keys import POLL_S
from graftwork.sessions.generation.usage import Accounting
from graftwork.sessions.responses.conversations import ConversationService
from graftwork.sessions.responses.service import ResponseService
from graftwork.sessions.service import SessionService
from graftwork.sessions.store.event_log import EventLog
from graftwork.sessions.store.turn_store import TurnStore
from graftwork.sessions.text.encoding import PromptEncoder
from graftwork.sessions.turns.kv import SessionKvClient
from graftwork.sessions.turns.runner import TurnDependencies

_USAGE_FOLDER = "usage"
"""The folder of the usage journals in the data folder."""
_RENEWALS_PER_LEASE = 10
"""How often the leases of quota and idempotency keys are renewed in the length of a lease. What could not be sent is sent again as often."""
_HEARTBEATS_PER_LEASE = 3
"""How often the lease of a session is renewed in its length, while its turn makes no events."""
_FLUSH_S = 1.0
_ACCESS_S = 1.0


@asynccontextmanager
async def open_resources(
    settings: Settings,
    *,
    engine: EngineClient | None = None,
    clock: Clock | None = None,
    inspector: AdapterInspector | None = None,
) -> AsyncGenerator[Resources, None]:
    """Opens all services that routes need, for the duration of the `async with` block.

    If the caller passes an `inspector`, it stays open after the block. By default `engine` is the engine at the
    settings' address.
    Raises Unavailable if the engine does not answer.
    """
    clock = clock or SystemClock()
    await asyncio.to_thread(prepare_data_folder, settings.data_dir)
    async with AsyncExitStack() as stack:
        database = Database(settings.resolved_database_url, settings.lease_s)
        stack.push_async_callback(database.close)
        await database.upgrade_to_head()
        keys = await open_tenant_keys(settings.master_key_file, database, clock)
        encrypt_rows(database, keys, clock)
        telemetry = Telemetry(ObjectiveMeter(settings.objectives, clock))
        engine = engine or connect_engine(settings, database)
        stack.push_async_callback(engine.close)
        if inspector is None:
            inspector = AdapterInspector()
            stack.push_async_callback(inspector.close)
        lease = GatewayLease.of_gateway(owner_name(settings.host, settings.port), settings.lease_s)
        tracing = await stack.enter_async_context(open_tracing(settings, clock, database, lease.gateway_id))
        activity = ActivityMeter(clock, settings.objectives)
        ledger = await open_ledger(stack, settings, database, clock, engine)
        base = Foundation(
            settings, clock, database, telemetry, engine, inspector, activity, lease, tracing, keys, ledger
        )
        resources = await _assemble(base)
        backlog = resources.inference.accounting.backlog
        await _keep_alive(stack, settings.lease_s, database, resources.server)
        stack.push_async_callback(resources.inference.encoding.close)
        stack.push_async_callback(resources.server.json.close)
        stack.callback(backlog.journal.close)
        stack.push_async_callback(backlog.flush)
        await stack.enter_async_context(repeating(backlog.flush, _FLUSH_S, "storing usage rows"))
        await _follow(stack, base, resources)
        stack.push_async_callback(resources.overview.close)
        stack.push_async_callback(resources.inference.tasks.close)
        stack.push_async_callback(resources.sessions.sessions.close)
        await resources.account.registry.sweep()
        await open_sweeps(stack, base, resources)
        await stack.enter_async_context(running_batches(resources, base.lease))
        await stack.enter_async_context(making_exports(resources.rights))
        await stack.enter_async_context(running_fetches(resources, base.lease, hub_address()))
        yield resources


async def _follow(stack: AsyncExitStack, base: Foundation, resources: Resources) -> None:
    """Follows what other gateways change in the database: price lists, access and degraded modes. Also stores when keys
    were used.
    """
    prices, modes = resources.admin.prices, resources.admin.modes
    access = AccessWatch(base.database, resources.inference.work, base.clock)
    tenancy = resources.account.tenancy
    await prices.refresh()
    await modes.refresh()
    await tenancy.changes.poll()
    await resources.people.people.settle_all()
    stack.push_async_callback(tenancy.uses.flush)
    await stack.enter_async_context(repeating(tenancy.changes.poll, POLL_S, "reading the changes of access"))
    await stack.enter_async_context(repeating(tenancy.uses.flush, FLUSH_USES_S, "storing the last uses of keys"))
    await stack.enter_async_context(repeating(prices.refresh, PRICES_S, "reading the price lists"))
    await stack.enter_async_context(repeating(access.check, _ACCESS_S, "ending work without access"))
    await stack.enter_async_context(repeating(modes.refresh, REFRESH_S, "reading the degraded modes"))
    rollouts = RolloutController(
        base.database, resources.account.registry.rollouts, base.activity.outcomes, base.lease.gateway_id, base.clock
    )
    await stack.enter_async_context(repeating(rollouts.tick, TICK_S, "advancing roll-outs"))
    await _send_alerts(stack, base, resources.admin.pepper)


async def _send_alerts(stack: AsyncExitStack, base: Foundation, pepper: bytes) -> None:
    """Notices budgets that are reached, and sends the alerts that are due. What is not sent is in the database."""
    sender = AlertSender(base.clock, base.settings.webhook_networks)
    alerts = BudgetAlerts(base.database, base.clock, pepper, sender)
    await stack.enter_async_context(repeating(alerts.watch, WATCH_S, "looking for budgets that are reached"))
    await stack.enter_async_context(repeating(alerts.deliver, DELIVER_S, "sending alerts"))
    await stack.enter_async_context(repeating(alerts.drop_old, SWEEP_S, "the sweep of old alerts"))


async def _keep_alive(stack: AsyncExitStack, lease_s: float, database: Database, server: ServerResources) -> None:
    """Renews what this gateway holds, in the quotas and in the database, until `stack` is closed. Also ends what other
    gateways hold in the database but no longer renew.
    """
    interval_s = lease_s / _RENEWALS_PER_LEASE
    ending = repeating(database.end_stopped_transactions, interval_s, "ending transactions of stopped gateways")
    await stack.enter_async_context(ending)
    leases: dict[str, QuotaKeeper | IdempotencyStore] = {
        "quota": server.quotas,
        "idempotency keys": server.idempotency,
    }
    await server.idempotency.open()
    await server.quotas.keep_alive()
    for name, held in leases.items():
        stack.push_async_callback(held.close)
        beating = repeating(held.keep_alive, interval_s, f"renewing the leases of {name}")
        await stack.enter_async_context(beating)


@dataclass(frozen=True, slots=True)
class _TenantServices:
    """The services that know the tenants, their keys, their limits and what they used."""

    pepper: bytes
    admin_key: str
    work: RunningWork
    tenancy: Tenancy
    meter: UsageMeter
    quotas: QuotaKeeper
    modes: ModeSwitch
    prices: PriceKeeper


async def _assemble(base: Foundation) -> Resources:
    tenants = await _tenant_services(base)
    served = await read_served_model(base, tenants.modes)
    inference = _inference_resources(base, tenants, served)
    sessions = _session_resources(base, inference, served)
    batches = batch_resources(base.settings, base.database, base.clock, base.vault(FILES_FOLDER))
    vault, artifacts = base.vault(EXPORTS_FOLDER), artifact_store(base.settings)
    rights = rights_resources(base.settings, base.database, base.clock, base.lease, vault, artifacts, sessions, batches)
    people = people_resources(base.settings, base.database, base.clock, tenants.pepper, tenants.tenancy)
    limit_use = LimitUse(
        tenants.tenancy.limits, inference.registry, tenants.meter, sessions.sessions.store.count_open, base.clock
    )
    account = _account_resources(base, tenants, inference, limit_use)
    owners = (sessions.sessions, batches.batches, rights, account.pending_uploads, people.people)
    admin = _admin_resources(base, tenants, inference, limit_use, tenant_erasure(base, inference, *owners))
    return Resources(
        inference=inference,
        sessions=sessions,
        account=account,
        batches=batches,
        rights=rights,
        admin=admin,
        people=people,
        server=_server_resources(base, tenants),
        overview=_overview(base, admin),
    )


def _overview(base: Foundation, admin: AdminResources) -> OverviewBoard:
    engines = EngineBoard(admin.replicas, admin.description, base.clock)
    directory = OwnerDirectory(admin.tenancy, admin.registry, base.activity)
    return OverviewBoard(base.activity, engines, directory, admin.description.model_name)


async def _tenant_services(base: Foundation) -> _TenantServices:
    pepper = await asyncio.to_thread(load_pepper, base.settings)
    admin_key = await asyncio.to_thread(load_admin_key, base.settings)
    work, meter = RunningWork(), UsageMeter(base.database)
    tenancy = Tenancy(base.database, pepper, base.clock, work)
    count = partial(base.lease.count_alive, base.database)
    quotas = await open_quotas(base.settings.redis_url, base.clock, meter, base.settings.lease_s, count)
    modes, prices = ModeSwitch(base.database, base.clock), PriceKeeper(base.database, base.clock)
    return _TenantServices(pepper, admin_key, work, tenancy, meter, quotas, modes, prices)


def _inference_resources(base: Foundation, tenants: _TenantServices, served: ServedModel) -> InferenceResources:
    description = served.generator.description
    book = tenants.prices.book
    backlog = UsageBacklog(tenants.meter, UsageJournal(base.settings.data_dir / _USAGE_FOLDER), book)
    in_flight = InFlightBound(base.clock, description.max_requests, description.max_domain_requests)
    return InferenceResources(
        clock=base.clock,
        pepper=tenants.pepper,
        registry=_registry(base),
        generator=served.generator,
        accounting=Accounting(
            tenants.tenancy.limits.of_active,
            tenants.quotas,
            backlog,
            base.telemetry,
            base.clock,
            in_flight,
            base.activity,
            book,
        ),
        description=description,
        folder=served.folder,
        encoding=served.encoding(base.clock),
        planner=served.planner,
        tasks=ServerTasks(),
        work=tenants.work,
    )


def _session_resources(base: Foundation, inference: InferenceResources, served: ServedModel) -> SessionResources:
    settings = base.settings
    owner = owner_name(settings.host, settings.port) or new_id("gateway")
    turns = TurnStore(base.database, base.clock, owner, settings.lease_s, book=inference.accounting.book)
    dependencies = _turn_dependencies(inference, turns, base.engine, served.prompts, settings.lease_s)
    sessions = SessionService(base.database, inference.registry, dependencies)
    return SessionResources(
        clock=base.clock,
        base_name=inference.description.model_name,
        sessions=sessions,
        meter=UsageMeter(base.database),
        responses=ResponseService(base.database, sessions, base.clock),
        conversations=ConversationService(sessions),
        tasks=inference.tasks,
        work=inference.work,
    )


def _account_resources(
    base: Foundation, tenants: _TenantServices, inference: InferenceResources, limit_use: LimitUse
) -> AccountResources:
    bounds = (base.settings.max_uploads, base.settings.max_tenant_uploads)
    uploads = UploadBound(*bounds, base.clock, base.settings.upload_timeout_s)
    known = (tenants.tenancy, tenants.meter, tenants.prices)
    served = (inference.registry, inference.description)
    pending = upload_keeper(base.settings, base.database, base.clock, *served)
    return AccountResources(base.clock, *known, *served, uploads, pending, limit_use)


def _admin_resources(
    base: Foundation,
    tenants: _TenantServices,
    inference: InferenceResources,
    limit_use: LimitUse,
    erasure: TenantErasure,
) -> AdminResources:
    return AdminResources(
        settings=base.settings,
        clock=base.clock,
        pepper=tenants.pepper,
        tenancy=tenants.tenancy,
        limit_use=limit_use,
        meter=tenants.meter,
        agreement=base.ledger.agreement,
        backlog=inference.accounting.backlog,
        prices=tenants.prices,
        registry=inference.registry,
        engine=base.engine,
        replicas=replica_directory(base.engine, base.settings.resolved_engine_address),
        description=inference.description,
        erasure=erasure,
        modes=tenants.modes,
        webhooks=Webhooks(base.database, base.clock, tenants.pepper),
        switchboard=base.tracing.switchboard,
        tasks=inference.tasks,
    )


def _server_resources(base: Foundation, tenants: _TenantServices) -> ServerResources:
    settings, admin_key = base.settings, AdminKey(tenants.admin_key, tenants.pepper, base.clock)
    return ServerResources(
        settings=settings,
        clock=base.clock,
        database=base.database,
        gate=Authenticator.of_gateway(
            tenants.tenancy,
            admin_key,
            base.clock,
            settings.max_wrong_keys,
            Operators(base.database, base.clock, tenants.pepper),
        ),
        idempotency=IdempotencyStore(base.database, base.clock, base.lease),
        quotas=tenants.quotas,
        telemetry=base.telemetry,
        engine=base.engine,
        replicas=replica_directory(base.engine, settings.resolved_engine_address),
        json=JsonParsing(),
        traces=base.tracing.book,
        trace_store=base.tracing.store,
    )


def _registry(base: Foundation) -> AdapterRegistry:
    return AdapterRegistry(
        base.database,
        artifact_store(base.settings),
        base.inspector,
        clock=base.clock,
        probe=base.engine.probe_adapter,
        before_free=base.engine.forget_adapter,
        grace_s=base.settings.adapter_grace_s,
    )


def _turn_dependencies(
    inference: InferenceResources, turns: TurnStore, engine: EngineClient, prompts: PromptEncoder | None, lease_s: float
) -> TurnDependencies:
    return TurnDependencies(
        generator=inference.generator,
        accounting=inference.accounting,
        store=turns,
        log=EventLog(turns.append, inference.clock, asyncio.sleep),
        kv=SessionKvClient(engine, inference.pepper, inference.generator.public_prefixes, inference.generator.kv_keys),
        encoder=prompts,
        encoding=inference.encoding,
        clock=inference.clock,
        pepper=inference.pepper,
        heartbeat_s=lease_s / _HEARTBEATS_PER_LEASE,
        planner=inference.planner,
        work=inference.work,
    )
