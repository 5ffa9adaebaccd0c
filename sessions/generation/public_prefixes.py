"""Beginnings of prompts that the operator has declared public: their KV may be shared between tenants.

Owns the comparison of token ids; never decides what is public. Only what is equal to a declared text, token for
token, from the very start of a prompt, is shared: nothing that a tenant has written ever is.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from graftwork.platform.errors import InvalidRequest
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


NO_PUBLIC_PREFIXES = PublicPrefixes(())


def _common(first: Sequence[int], second: Sequence[int]) -> int:
    count = 0
    for one, other in zip(first, second, strict=False):
        if one != other:
            break
        count += 1
    return count
