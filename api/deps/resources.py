"""Everything that the routes work with, as plain objects that one process owns.

Built and taken down by `lifespan`; handed to handlers by `dependencies`. There is no other way to reach them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from fastapi import Request

from graftwork.adapters.format.specs import ResolvedModel
from graftwork.adapters.registry.artifact_store import ArtifactStore
from graftwork.adapters.registry.registry import AdapterRegistry
from graftwork.api.deps.background import ServerTasks
from graftwork.api.schemas.common import MixturePart
from graftwork.engine.core.client import EngineClient
from graftwork.engine.core.stats import EngineDescription
from graftwork.platform.clock import Clock
from graftwork.platform.database import Database
from graftwork.platform.errors import InvalidRequest
from graftwork.platform.quotas.quotas import QuotaKeeper
from graftwork.platform.settings import Settings
from graftwork.platform.telemetry import Telemetry
from graftwork.platform.tenancy.auth import Authenticator
from graftwork.platform.tenancy.idempotency import IdempotencyStore
from graftwork.platform.tenancy.metering import UsageMeter
from graftwork.platform.tenancy.principals import Principal
from graftwork.platform.tenancy.tenancy import Tenancy
from graftwork.sessions.generation.constraints import ConstraintPlanner
from graftwork.sessions.generation.generator import Generator
from graftwork.sessions.generation.usage import Accounting
from graftwork.sessions.responses.conversations import ConversationService
from graftwork.sessions.responses.service import ResponseService
from graftwork.sessions.service import SessionService
from graftwork.sessions.text.model_files import ModelFolder
from graftwork.sessions.text.prompt_encoder import PromptEncoder
from graftwork.sessions.text.tokenizer import TextTokenizer


@dataclass(frozen=True)
class Resources:
    settings: Settings
    clock: Clock
    pepper: bytes
    database: Database
    tenancy: Tenancy
    gate: Authenticator
    quotas: QuotaKeeper
    meter: UsageMeter
    idempotency: IdempotencyStore
    telemetry: Telemetry
    artifacts: ArtifactStore
    registry: AdapterRegistry
    engine: EngineClient
    description: EngineDescription
    """As the engine described itself at start-up."""
    generator: Generator
    accounting: Accounting
    folder: ModelFolder
    prompts: PromptEncoder | None
    """None for a model without a chat template."""
    sessions: SessionService
    responses: ResponseService
    conversations: ConversationService
    tasks: ServerTasks
    planner: ConstraintPlanner
    """Of answers, in the form in which this model writes calls."""

    @property
    def tokenizer(self) -> TextTokenizer:
        return self.folder.tokenizer

    @property
    def base_name(self) -> str:
        """What clients call the base model."""
        return self.description.model_name

    def chat_prompts(self) -> PromptEncoder:
        """Raises InvalidRequest for a model that cannot chat."""
        if self.prompts is None:
            raise InvalidRequest(
                "This model has no chat template, so it cannot chat; use /v1/completions.", code="no_chat_template"
            )
        return self.prompts

    async def resolve(
        self, principal: Principal, model: str, parts: Sequence[MixturePart] | None = None
    ) -> ResolvedModel:
        """What `model` stands for, or the mixture of `parts` on it.

        Raises NotFound for whatever this tenant cannot use under that name.
        """
        scope = principal.scope()
        resolved = await self.registry.resolve(scope, model, self.base_name)
        if not parts:
            return resolved
        if resolved.version is not None:
            raise InvalidRequest(
                f"With `adapters`, `model` is the base model, {self.base_name!r}; name {model!r} among the adapters.",
                param="model",
            )
        mixed = []
        for index, part in enumerate(parts):
            found = await self.registry.resolve(scope, part.model, self.base_name)
            if found.version is None:
                raise InvalidRequest("The base model is no adapter: leave it out.", param=f"adapters[{index}].model")
            mixed.append((found.version, part.weight))
        return ResolvedModel(model, None, tuple(mixed))

    def check_token_ids(self, token_ids: Sequence[int], param: str) -> None:
        """Raises InvalidRequest for ids outside the model's vocabulary."""
        if token_ids and not 0 <= min(token_ids) <= max(token_ids) < self.description.vocab_size:
            message = f"{param} holds an id outside the vocabulary of {self.description.vocab_size} tokens."
            raise InvalidRequest(message, param=param)


def resources_of(request: Request) -> Resources:
    resources = request.app.state.resources
    assert isinstance(resources, Resources)
    return resources
