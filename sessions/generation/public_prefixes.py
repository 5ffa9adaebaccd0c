"""Beginnings of prompts that the operator has declared public: their KV may be shared between tenants.

Owns the comparison of token ids; never decides what is public. Only what is equal to a declared text, token for
token, from the very start of a prompt, is shared: nothing that a tenant has written ever is.
"""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from pathlib import Path

from graftwork.engine.core.client import EngineClient
from graftwork.engine.core.events import EngineEvent
from graftwork.engine.core.requests import EngineRequest
from graftwork.engine.core.session_commands import SessionCommand, SessionMemory
from graftwork.engine.core.stats import EngineDescription, EngineStats
from graftwork.platform.errors import InvalidRequest
from graftwork.platform.ids import IsolationDomain
from graftwork.sessions.text.messages import Message
from graftwork.sessions.text.prompt_encoder import PromptEncoder


@dataclass(frozen=True, slots=True)
class PublicPrefixes:
    """Declared system prompts, as the beginnings of prompts."""

    prefixes: tuple[tuple[int, ...], ...]

    @classmethod
    def read(cls, path: Path, encoder: PromptEncoder) -> "PublicPrefixes":
        """One declared system prompt from a file, or one from each `.txt` file of a folder. Raises InvalidRequest."""
        files = sorted(path.glob("*.txt")) if path.is_dir() else [path]
        try:
            texts = [file.read_text(encoding="utf-8").removesuffix("\n") for file in files]
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidRequest(
                f"public_prompts: {error}. Give a UTF-8 text file, or a folder of `.txt` files.", param="public_prompts"
            ) from error
        return cls(
            tuple(encoder.encode_messages([Message("system", text)], add_generation_prompt=False) for text in texts)
        )

    def tokens_of(self, prompt: Sequence[int]) -> int:
        """How many tokens at the start of a prompt are public."""
        return max((_common(prefix, prompt) for prefix in self.prefixes), default=0)


class PublicPrefixEngine:
    """An engine client that says of each prompt how much of it is public. Owns the wrapped client."""

    def __init__(self, engine: EngineClient, prefixes: PublicPrefixes) -> None:
        self._engine = engine
        self._prefixes = prefixes

    async def generate(self, request: EngineRequest) -> AsyncGenerator[EngineEvent, None]:
        public = replace(request, public_tokens=self._prefixes.tokens_of(request.prompt_token_ids))
        async with aclosing(self._engine.generate(public)) as events:
            async for event in events:
                yield event

    async def run_session_command(self, command: SessionCommand) -> SessionMemory:
        return await self._engine.run_session_command(
            replace(command, public_tokens=self._prefixes.tokens_of(command.token_ids))
        )

    async def describe(self) -> EngineDescription:
        return await self._engine.describe()

    async def stats(self) -> EngineStats:
        return await self._engine.stats()

    async def probe_adapter(self, digest: str) -> None:
        await self._engine.probe_adapter(digest)

    async def forget_adapter(self, digest: str) -> None:
        await self._engine.forget_adapter(digest)

    async def forget_domain(self, domain: IsolationDomain) -> None:
        await self._engine.forget_domain(domain)

    async def close(self) -> None:
        await self._engine.close()


def _common(first: Sequence[int], second: Sequence[int]) -> int:
    count = 0
    for one, other in zip(first, second, strict=False):
        if one != other:
            break
        count += 1
    return count
