"""Public prefixes: starts of prompts that the operator declares public, so that all tenants may share their KV.

Owns the comparison of prompts with the declared texts. Never decides what is public.
Invariant: only tokens equal to a declared text, from the start of a prompt on, are shared. A tenant's own text never is.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from graftwork.platform.errors import InvalidRequest
from graftwork.sessions.text.messages import Message
from graftwork.sessions.text.prompt_encoder import PromptEncoder


@dataclass(frozen=True, slots=True)
class PublicPrefixes:
    """The token ids of the declared system prompts, rendered as the start of a prompt."""

    prefixes: tuple[tuple[int, ...], ...]

    @classmethod
    def read(cls, path: Path, encoder: PromptEncoder) -> "PublicPrefixes":
        """Read one system prompt from a file, or one from each `.txt` file of a folder. Raises InvalidRequest."""
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
