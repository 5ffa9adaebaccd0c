"""Reads the facts that the gateway needs from a model's folder: names, special tokens, context length, chat template.

Owns the list of files to search for each fact, in the same order as `transformers`.
Never reads weights, never imports torch, and never writes to the folder.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from graftwork.platform.clock import Clock
from graftwork.platform.errors import InvalidRequest, ValidationFailed
from graftwork.sessions.text.chat_template import ChatTemplate
from graftwork.sessions.text.encoding import PromptEncoder
from graftwork.sessions.text.tokenizer import TextTokenizer

NAMED_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """What the files in a model's folder say about the model, such as its special tokens and context length."""

    path: Path
    name: str
    """The folder's name. An operator may serve the model under another name."""
    tokenizer: TextTokenizer
    special_tokens: Mapping[str, str]
    """Special tokens by the names that templates use, such as `eos_token`."""
    eos_token_ids: tuple[int, ...]
    context_tokens: int
    """The most tokens of a prompt and its completion together."""
    chat_template_source: str | None
    """The source of the chat template. A model without a template (None) serves only text completions."""

    @classmethod
    def load(cls, path: Path) -> "ModelFolder":
        """Reads the files of the model folder `path`: config.json, tokenizer.json and optional files.

        Raises ValidationFailed if a file is missing or wrong, or if the tokenizer has tokens that the model's embedding
        lacks. The error names the file.
        """
        config = _read_object(path / "config.json")
        tokenizer_config = _read_object(path / "tokenizer_config.json", missing_is_empty=True)
        special_tokens = _special_tokens(tokenizer_config)
        tokenizer = TextTokenizer(_read_text(path / "tokenizer.json"), special_tokens.values())
        template = _chat_template(path, tokenizer_config)
        _check_embedding(tokenizer, config.get("vocab_size"), " ".join([*special_tokens.values(), template or ""]))
        return cls(
            path=path,
            name=path.resolve().name,
            tokenizer=tokenizer,
            special_tokens=special_tokens,
            eos_token_ids=_eos_token_ids(path, config, tokenizer.token_id(special_tokens.get("eos_token", ""))),
            context_tokens=_context_tokens(config),
            chat_template_source=template,
        )

    def chat_template(self, clock: Clock) -> ChatTemplate:
        """Compiles the chat template of this model. Raises InvalidRequest if the model has no chat template."""
        if self.chat_template_source is None:
            raise InvalidRequest(
                "This model has no chat template, so it cannot chat; use /v1/completions.", code="no_chat_template"
            )
        ends = [self.tokenizer.token_text(token_id) for token_id in self.eos_token_ids]
        return ChatTemplate(
            self.chat_template_source,
            clock,
            special_tokens=self.special_tokens,
            end_of_turn_texts=[text for text in ends if text],
        )

    def prompt_encoder(self, clock: Clock) -> PromptEncoder:
        """Returns the encoder that turns messages into this model's prompts.

        Raises InvalidRequest if the model has no chat template.
        """
        return PromptEncoder(self.chat_template(clock), self.tokenizer, self.context_tokens)


def _check_embedding(tokenizer: TextTokenizer, rows: object, used: str) -> None:
    """Raises ValidationFailed if the tokenizer has tokens beyond the `rows` of the model's embedding.

    An added token may lie beyond them if it is not in `used`, the texts of the special tokens and of the chat template:
    the tokenizer of a text model may also be that of a model for images.
    """
    if not isinstance(rows, int):
        return
    own = tokenizer.backend.get_vocab(with_added_tokens=False)
    every = tokenizer.backend.get_vocab(with_added_tokens=True)
    beyond = {text: token_id for text, token_id in every.items() if token_id >= rows and (text in own or text in used)}
    if beyond:
        text = min(beyond, key=lambda found: beyond[found])
        raise ValidationFailed(
            f"tokenizer.json has {len(beyond)} tokens that the model's embedding of {rows} rows lacks, {text!r} with the id "
            f"{beyond[text]} among them: the two files belong to different models, or the embedding was not resized.",
            param="tokenizer.json",
        )


def _special_tokens(tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    """Reads the special tokens. Older tokenizers write a text, newer ones an object with a `content`."""
    found = {}
    for name in NAMED_SPECIAL_TOKENS:
        value = tokenizer_config.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            found[name] = text
    return found


def _eos_token_ids(path: Path, config: Mapping[str, Any], named: int | None) -> tuple[int, ...]:
    """Returns all ids that end a generation, each once, in the order found."""
    generation_config = _read_object(path / "generation_config.json", missing_is_empty=True)
    found: list[int] = []
    for value in (generation_config.get("eos_token_id"), config.get("eos_token_id"), named):
        token_ids = value if isinstance(value, list) else [value]
        found += [token_id for token_id in token_ids if isinstance(token_id, int)]
    return tuple(dict.fromkeys(found))


def _context_tokens(config: Mapping[str, Any]) -> int:
    context = config.get("max_position_embeddings")
    if not isinstance(context, int) or context < 1:
        raise ValidationFailed("config.json has no max_position_embeddings.", param="config.json")
    return context


def _chat_template(path: Path, tokenizer_config: Mapping[str, Any]) -> str | None:
    """Finds the template: first in its own file, then in the older places (a JSON file and a field of the config)."""
    if (path / "chat_template.jinja").exists():
        return _read_text(path / "chat_template.jinja")
    older = _read_object(path / "chat_template.json", missing_is_empty=True)
    template = older.get("chat_template") or tokenizer_config.get("chat_template")
    if isinstance(template, list):
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    return template if isinstance(template, str) else None


def _read_object(path: Path, *, missing_is_empty: bool = False) -> dict[str, Any]:
    if missing_is_empty and not path.exists():
        return {}
    try:
        content = json.loads(_read_text(path))
    except ValueError as error:
        raise ValidationFailed(f"{path.name} is no JSON: {error}", param=path.name) from error
    if not isinstance(content, dict):
        raise ValidationFailed(f"{path.name} holds no object.", param=path.name)
    return content


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValidationFailed(f"{path} cannot be read: {error}", param=path.name) from error
