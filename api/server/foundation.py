"""Holds what all services of a gateway stand on: its settings, clock, database and engine, and the model it serves."""

import asyncio
from contextlib import AsyncExitStack
from dataclasses import dataclass

from graftwork.adapters.inspection.inspector import AdapterInspector
from graftwork.api.deps.background import repeating
from graftwork.api.server.served_model import model_folder
from graftwork.api.server.tracing import Tracing
from graftwork.engine.core.client import EngineClient
from graftwork.engine.core.reports import ReportingClient
from graftwork.platform.activity.meter import ActivityMeter
from graftwork.platform.batches.file_folder import FileFolder
from graftwork.platform.batches.file_vault import FileVault
from graftwork.platform.clock import Clock
from graftwork.platform.database import Database
from graftwork.platform.encryption.kv_keys import TenantKvKeys
from graftwork.platform.encryption.tenant_keys import TenantKeys
from graftwork.platform.gateways.lease import GatewayLease
from graftwork.platform.ledger.upkeep.keeping import LedgerKeeping
from graftwork.platform.ledger.upkeep.rollups import ROLL_UP_S
from graftwork.platform.modes.modes import ModeSwitch
from graftwork.platform.settings.settings import Settings
from graftwork.platform.telemetry import Telemetry
from graftwork.sessions.generation.constraints import ConstraintPlanner
from graftwork.sessions.generation.generator import Generator
from graftwork.sessions.generation.reasoning import ReasoningModel, reasoning_format
from graftwork.sessions.text.encoding import (
    NO_PUBLIC_PREFIXES,
    LocalEncoding,
    PromptEncoder,
    PromptEncoding,
    PublicPrefixes,
)
from graftwork.sessions.text.model_files import ModelFolder
from graftwork.sessions.tools.formats import tool_call_format

_FLUSH_S = 1.0


@dataclass(frozen=True, slots=True)
class Foundation:
    """What all services of the gateway stand on."""

    settings: Settings
    clock: Clock
    database: Database
    telemetry: Telemetry
    engine: EngineClient
    inspector: AdapterInspector
    activity: ActivityMeter
    lease: GatewayLease
    tracing: Tracing
    keys: TenantKeys
    ledger: LedgerKeeping

    def vault(self, folder: str) -> FileVault:
        """Returns the tenants' files in a folder of the data folder."""
        return FileVault(FileFolder(self.settings.data_dir / folder), self.keys)


async def open_ledger(
    stack: AsyncExitStack, settings: Settings, database: Database, clock: Clock, engine: EngineClient
) -> LedgerKeeping:
    """Opens what keeps the usage ledger until `stack` is closed: the reports of `engine`, and the sums."""
    ledger = LedgerKeeping.of(settings, database, clock)
    if isinstance(engine, ReportingClient):
        engine.report_to(ledger.reports)
    stack.push_async_callback(ledger.reports.close)
    await stack.enter_async_context(repeating(ledger.reports.flush, _FLUSH_S, "storing what engines reported"))
    await stack.enter_async_context(repeating(ledger.rollups.roll_up, ROLL_UP_S, "the sweep of usage sums"))
    return ledger


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What this gateway has read about the served model, with the generator that uses the model."""

    generator: Generator
    folder: ModelFolder
    prompts: PromptEncoder | None
    planner: ConstraintPlanner

    def encoding(self, clock: Clock) -> PromptEncoding:
        """Returns what encodes prompts for this model. The caller closes it."""
        local = LocalEncoding(self.folder.tokenizer, self.prompts, self.generator.description.context_tokens)
        return PromptEncoding(local, clock)


async def read_served_model(base: Foundation, modes: ModeSwitch) -> ServedModel:
    """Reads the folder of the served model, and asks the engine what it serves."""
    settings, clock, engine = base.settings, base.clock, base.engine
    folder = await asyncio.to_thread(lambda: ModelFolder.load(model_folder(settings, with_weights=False)))
    prompts = folder.prompt_encoder(clock) if folder.chat_template_source is not None else None
    public_prefixes = NO_PUBLIC_PREFIXES
    if settings.public_prompts is not None and prompts is not None:
        public_prefixes = PublicPrefixes.read(settings.public_prompts, prompts)
    planner = ConstraintPlanner(tool_call_format(folder.chat_template_source, settings.tool_call_form))
    generator = Generator(
        engine,
        folder.tokenizer,
        await engine.describe(),
        base.telemetry,
        clock,
        tool_call_format=planner.tool_call_format,
        reasoning=_reasoning_model(folder, prompts, settings.reasoning_form),
        timeout_s=settings.request_timeout_s,
        deadlines_s=settings.deadlines,
        activity=base.activity,
        modes=modes,
        public_prefixes=public_prefixes,
        kv_keys=TenantKvKeys(base.keys, clock) if settings.encrypt_kv_files else None,
    )
    return ServedModel(generator, folder, prompts, planner)


def _reasoning_model(folder: ModelFolder, prompts: PromptEncoder | None, chosen: str) -> ReasoningModel | None:
    """Returns how the model of a folder reasons; None if it does not, or has no chat template."""
    form = reasoning_format(folder.chat_template_source, chosen)
    if form is None or prompts is None:
        return None
    return ReasoningModel.of(form, folder.tokenizer, prompts.template.variables())
