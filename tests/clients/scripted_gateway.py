"""A gateway on a real port whose model follows a script, and what the model was asked.

A script is a list of replies. Each names a text, and is given to a prompt that contains it; the first reply that fits
is given. So a client may send other requests beside the conversation, as coding agents do, and the script still holds.
"""

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from graftwork.engine.core.requests import EngineRequest
from graftwork.engine.core.stats import EngineDescription
from tests.api.fake_engine import BASE, FakeEngine
from tests.api.gateway_on_port import gateway_on_port
from tests.api.in_process_gateway import TestTenant, gateway_settings, open_gateway, write_model_folder
from tests.sessions.tokenizer_and_templates import text_tokenizer

CONTEXT_TOKENS = 262_144
"""The context of the scripted model. Prompts of coding agents are long, and its tokens are short."""


@dataclass(frozen=True, slots=True)
class Reply:
    """What the model answers to a prompt that contains `after`, and all of `needs`."""

    after: str
    text: str
    needs: tuple[str, ...] = ()


def tool_call(name: str, arguments: str) -> str:
    """Returns a call as the scripted model writes it. `arguments` is a JSON text."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


@dataclass(frozen=True, slots=True)
class Exchange:
    """One request as the engine saw it, and its answer."""

    prompt: str
    prompt_tokens: int
    text: str
    completion_tokens: int
    grammar: str
    """The grammar that the answer must follow, as the engine reads it; empty if there is none."""


@dataclass
class ScriptedModel(FakeEngine):
    """Answers each prompt with the first reply that fits it."""

    text: str = "I have nothing to say to this."
    """The answer if no reply fits."""
    context_tokens: int = CONTEXT_TOKENS
    model_name: str = BASE
    replies: Sequence[Reply] = ()
    """The latest stage of the conversation comes first, because its prompts contain all earlier ones."""
    exchanges: list[Exchange] = field(default_factory=list)

    async def describe(self) -> EngineDescription:
        return replace(await super().describe(), context_tokens=self.context_tokens, model_name=self.model_name)

    def answer_to(self, request: EngineRequest) -> str:
        tokenizer = text_tokenizer()
        prompt = tokenizer.decode(request.prompt_token_ids, skip_special_tokens=False)
        fitting = (reply for reply in self.replies if all(text in prompt for text in (reply.after, *reply.needs)))
        text = next((reply.text for reply in fitting), self.text)
        num_tokens = len(tokenizer.encode(text, allow_special=True)) + 1
        grammar = "" if request.grammar is None else request.grammar.text
        self.exchanges.append(Exchange(prompt, len(request.prompt_token_ids), text, num_tokens, grammar))
        return text


@dataclass
class ScriptedGateway:
    """Where the gateway listens, a key for it, and its model."""

    url: str
    tenant: TestTenant
    model: ScriptedModel

    @property
    def environment(self) -> dict[str, str]:
        """The variables that clients read by themselves."""
        return {
            "OPENAI_BASE_URL": f"{self.url}/v1",
            "OPENAI_API_KEY": self.tenant.key,
            "ANTHROPIC_BASE_URL": self.url,
            "ANTHROPIC_API_KEY": self.tenant.key,
            "GRAFTWORK_MODEL": self.model.model_name,
        }


@asynccontextmanager
async def scripted_gateway(
    folder: Path, context_tokens: int = CONTEXT_TOKENS, model_name: str = BASE, template: str | None = None
) -> AsyncGenerator[ScriptedGateway, None]:
    """Runs a gateway with its data in `folder`, and with this chat template; None is that of the model's folder."""
    model = ScriptedModel(context_tokens=context_tokens, model_name=model_name)
    model_folder = write_model_folder(folder / BASE, context_tokens)
    if template is not None:
        (model_folder / "chat_template.jinja").write_text(template)
    settings = gateway_settings(folder, model_folder)
    async with open_gateway(settings, engine=model) as gateway, gateway_on_port(gateway) as url:
        tenant = await gateway.tenant()
        async with tenant.client:
            yield ScriptedGateway(url, tenant, model)
