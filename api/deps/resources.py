"""Groups the services of one process, such as the adapter registry, by the routes that use them.

Owns the types of the parameters that FastAPI passes to a handler: a group of services, the request's id, or the
principal, which is the owner of the request's API key. Checks that this key has the scope that a route needs.
Never builds or closes a service, and never authenticates a request.
"""

from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Annotated, Any

from fastapi import Depends, Request

from graftwork.adapters.format.specs import Caller, ResolvedModel
from graftwork.adapters.registry.registry import AdapterRegistry
from graftwork.adapters.uploads.uploads import UploadKeeper
from graftwork.api.deps.background import ServerTasks
from graftwork.api.deps.limit_use import LimitUse
from graftwork.api.deps.people import PeopleResources
from graftwork.api.overview.board import OverviewBoard
from graftwork.api.schemas.base import MixturePart
from graftwork.engine.core.client import EngineClient
from graftwork.engine.core.stats import EngineDescription
from graftwork.engine.fleet.replicas import ReplicaDirectory
from graftwork.platform.alerts.webhooks import Webhooks
from graftwork.platform.batches.batches import BatchKeeper
from graftwork.platform.batches.files import FileKeeper
from graftwork.platform.clock import Clock
from graftwork.platform.database import Database
from graftwork.platform.errors import InternalFailure, InvalidRequest
from graftwork.platform.exports.exports import ExportKeeper
from graftwork.platform.exports.worker import ExportWorker
from graftwork.platform.ids import RequestId
from graftwork.platform.json_worker import JsonParsing
from graftwork.platform.keys.scopes import Scope
from graftwork.platform.ledger.backlog import UsageBacklog
from graftwork.platform.ledger.meter import UsageMeter
from graftwork.platform.ledger.price_keeper import PriceKeeper
from graftwork.platform.ledger.upkeep.agreement import AgreementCheck
from graftwork.platform.modes.modes import ModeSwitch
from graftwork.platform.modes.trace_switches import TraceSwitchboard
from graftwork.platform.people.roles import require_tenant_admin
from graftwork.platform.quotas.quotas import QuotaKeeper
from graftwork.platform.quotas.uploads import UploadBound
from graftwork.platform.retention.retention import RetentionKeeper
from graftwork.platform.settings.settings import Settings
from graftwork.platform.telemetry import Telemetry
from graftwork.platform.tenancy.authenticator import Authenticator
from graftwork.platform.tenancy.erasure import TenantErasure
from graftwork.platform.tenancy.idempotency import IdempotencyStore
from graftwork.platform.tenancy.principals import AdminPrincipal, Principal, RunningWork
from graftwork.platform.tenancy.tenancy import Tenancy
from graftwork.platform.tracing.request_trace import Stage
from graftwork.platform.tracing.trace_book import TraceBook
from graftwork.platform.tracing.trace_store import TraceStore
from graftwork.sessions.generation.constraints import ConstraintPlanner
from graftwork.sessions.generation.generator import Generator
from graftwork.sessions.generation.usage import Accounting
from graftwork.sessions.responses.conversations import ConversationService
from graftwork.sessions.responses.service import ResponseService
from graftwork.sessions.service import SessionService
from graftwork.sessions.text.encoding import PromptEncoding, TextPrompt
from graftwork.sessions.text.model_files import ModelFolder
from graftwork.sessions.text.tokenizer import TextTokenizer


@dataclass(frozen=True, slots=True)
class InferenceResources:
    """The services that the routes for text generation use, such as the generator, and the description of the model."""

    clock: Clock
    pepper: bytes
    registry: AdapterRegistry
    generator: Generator
    accounting: Accounting
    description: EngineDescription
    """The description of the engine and its model, which the engine sent when this process started."""
    folder: ModelFolder
    encoding: PromptEncoding
    """Encodes prompts. Long prompts are encoded in worker processes."""
    planner: ConstraintPlanner
    """Plans constrained outputs. The planner knows the form in which this model writes tool calls."""
    tasks: ServerTasks
    work: RunningWork
    """What runs in this process, to be ended when its tenant or key loses its access."""

    @property
    def tokenizer(self) -> TextTokenizer:
        return self.folder.tokenizer

    @property
    def base_name(self) -> str:
        """The name that clients use for the base model."""
        return self.description.model_name

    async def resolve(
        self,
        principal: Principal,
        model: str,
        parts: Sequence[MixturePart] | None = None,
        *,
        user: str | None = None,
    ) -> ResolvedModel:
        """Finds the base model or the adapter version with the name `model`. `user` is the end user that the request
        names, who always gets the same version of a canary.

        If `parts` is given, returns the mixture of these adapters on the base model. Then `model` must be the base
        model.
        Raises NotFound for a name that this tenant cannot use, and NotPermitted for one that the key does not allow.
        Raises InvalidRequest for a mixture if `model` is not the base model, or if the mixture contains the base model.
        """
        scope, caller = principal.scope(), Caller.of(principal.key_id, user=user)
        if parts:
            principal.require_models([part.model for part in parts], "adapters")
        else:
            principal.require_models([model])
        resolved = await self.registry.resolve(scope, model, self.base_name, caller)
        if not parts:
            return resolved
        if resolved.version is not None:
            raise InvalidRequest(
                f"With `adapters`, `model` is the base model, {self.base_name!r}; name {model!r} among the adapters.",
                param="model",
            )
        mixed = []
        for index, part in enumerate(parts):
            found = await self.registry.resolve(scope, part.model, self.base_name, caller)
            if found.version is None:
                raise InvalidRequest("The base model is no adapter: leave it out.", param=f"adapters[{index}].model")
            mixed.append((found.version, part.weight))
        return ResolvedModel(model, None, tuple(mixed))

    async def encode(
        self, principal: Principal, prompt: str | Sequence[int], param: str, *, add_special_tokens: bool
    ) -> tuple[int, ...]:
        """Returns the token ids of a prompt, which may be token ids already. `param` is the prompt's field.

        Raises InvalidRequest for an empty prompt or an unknown token id.
        """
        if isinstance(prompt, str):
            text = TextPrompt(prompt, add_special_tokens=add_special_tokens)
            token_ids = await self.accounting.encode(principal, self.encoding, text)
        else:
            token_ids = tuple(prompt)
            self.check_token_ids(token_ids, param)
        if not token_ids:
            raise InvalidRequest(f"The {param} is empty: send at least one token.", param=param)
        return token_ids

    def check_token_ids(self, token_ids: Sequence[int], param: str) -> None:
        """Checks that all ids are in the model's vocabulary. Raises InvalidRequest, which names the field `param`."""
        if token_ids and not 0 <= min(token_ids) <= max(token_ids) < self.description.vocab_size:
            message = f"{param} holds an id outside the vocabulary of {self.description.vocab_size} tokens."
            raise InvalidRequest(message, param=param)


@dataclass(frozen=True, slots=True)
class SessionResources:
    """The services that the routes for sessions, responses and conversations use, such as the session service."""

    clock: Clock
    base_name: str
    """The name that clients use for the base model."""
    sessions: SessionService
    meter: UsageMeter
    responses: ResponseService
    conversations: ConversationService
    tasks: ServerTasks
    work: RunningWork
    """The requests of this process that end when their keys lose their access."""


@dataclass(frozen=True, slots=True)
class AccountResources:
    """The services that the routes for a tenant's adapters, usage and limits use, such as the adapter registry."""

    clock: Clock
    tenancy: Tenancy
    meter: UsageMeter
    prices: PriceKeeper
    registry: AdapterRegistry
    description: EngineDescription
    uploads: UploadBound
    """Limits the uploads that this process receives at the same time."""
    pending_uploads: UploadKeeper
    """The uploads in parts, and the fetches."""
    limit_use: LimitUse


@dataclass(frozen=True, slots=True)
class BatchResources:
    """The services that the routes for files and batches use."""

    files: FileKeeper
    batches: BatchKeeper
    max_file_bytes: int
    """The most bytes of one uploaded file."""


@dataclass(frozen=True, slots=True)
class RightsResources:
    """The services that the routes for exports and retention use."""

    exports: ExportKeeper
    worker: ExportWorker
    """Makes the exports that this process claims."""
    retention: RetentionKeeper
    tasks: ServerTasks


@dataclass(frozen=True, slots=True)
class AdminResources:
    """The services that the operator's routes use, such as the adapter registry and the client of the engine."""

    settings: Settings
    clock: Clock
    pepper: bytes
    tenancy: Tenancy
    limit_use: LimitUse
    meter: UsageMeter
    agreement: AgreementCheck
    backlog: UsageBacklog
    """The usage of this gateway that the database does not have yet."""
    prices: PriceKeeper
    registry: AdapterRegistry
    engine: EngineClient
    replicas: ReplicaDirectory
    description: EngineDescription
    erasure: TenantErasure
    modes: ModeSwitch
    webhooks: Webhooks
    switchboard: TraceSwitchboard
    tasks: ServerTasks


@dataclass(frozen=True, slots=True)
class ServerResources:
    """The services that authenticate requests, remember idempotency keys, check readiness and collect metrics."""

    settings: Settings
    clock: Clock
    database: Database
    gate: Authenticator
    idempotency: IdempotencyStore
    quotas: QuotaKeeper
    telemetry: Telemetry
    engine: EngineClient
    replicas: ReplicaDirectory
    json: JsonParsing
    """Parses long bodies in another process."""
    traces: TraceBook
    """The traces of this gateway's latest requests."""
    trace_store: TraceStore
    """The latest traced requests of all gateways."""


@dataclass(frozen=True, slots=True)
class Resources:
    """All services of one process, in one group for each kind of route."""

    inference: InferenceResources
    sessions: SessionResources
    account: AccountResources
    batches: BatchResources
    rights: RightsResources
    admin: AdminResources
    server: ServerResources
    people: PeopleResources
    overview: OverviewBoard
    """The snapshots of what this gateway and its engines do."""


def resources_of(request: Request) -> Resources:
    resources = request.app.state.resources
    assert isinstance(resources, Resources)
    return resources


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
        principal.trace.mark(Stage.BODY)  # FastAPI reads the body before it calls this
        return principal

    return principal_with_scope


async def _tenant_admin(request: Request) -> Principal:
    principal = await _principal(request)
    require_tenant_admin(principal)
    principal.trace.mark(Stage.BODY)
    return principal


ForInference = Annotated[InferenceResources, Depends(_group(attrgetter("inference")))]
ForSessions = Annotated[SessionResources, Depends(_group(attrgetter("sessions")))]
ForAccounts = Annotated[AccountResources, Depends(_group(attrgetter("account")))]
ForBatches = Annotated[BatchResources, Depends(_group(attrgetter("batches")))]
ForRights = Annotated[RightsResources, Depends(_group(attrgetter("rights")))]
ForAdmin = Annotated[AdminResources, Depends(_group(attrgetter("admin")))]
ForOverview = Annotated[OverviewBoard, Depends(_group(attrgetter("overview")))]
ForPeople = Annotated[PeopleResources, Depends(_group(attrgetter("people")))]
ForServer = Annotated[ServerResources, Depends(_group(attrgetter("server")))]
CurrentRequestId = Annotated[RequestId, Depends(_request_id)]
AnyTenantKey = Annotated[Principal, Depends(_principal)]
ReadingKey = Annotated[Principal, Depends(_holder_of(Scope.READ))]
InferenceKey = Annotated[Principal, Depends(_holder_of(Scope.INFERENCE))]
AdapterKey = Annotated[Principal, Depends(_holder_of(Scope.ADAPTERS))]
UsageKey = Annotated[Principal, Depends(_holder_of(Scope.USAGE))]
ExportKey = Annotated[Principal, Depends(_holder_of(Scope.EXPORT))]
TenantAdmin = Annotated[Principal, Depends(_tenant_admin)]
Admin = Annotated[AdminPrincipal, Depends(_admin)]
