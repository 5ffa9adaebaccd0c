"""Names of adapters and aliases, and the forms of a `model` in a request.

Owns the rules that keep `name`, `name@3` and `name@alias` distinct from each other and from a path.
"""

import re
from dataclasses import dataclass

from graftwork.platform.errors import NotFound, ValidationFailed

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}", re.ASCII)
_VERSION = re.compile(r"[1-9][0-9]{0,8}", re.ASCII)
_SHOWN_CHARACTERS = 200


@dataclass(frozen=True, slots=True)
class ModelReference:
    """An adapter as a request names it. At most one of `version` and `alias` is set."""

    name: str
    version: int | None = None
    alias: str | None = None


def shown(text: str) -> str:
    """A caller's text in a form that is safe to echo: printable ASCII of limited length."""
    escaped = text[:_SHOWN_CHARACTERS].encode("ascii", "backslashreplace").decode("ascii")
    printable = "".join(character if character.isprintable() else f"\\x{ord(character):02x}" for character in escaped)
    return printable if len(text) <= _SHOWN_CHARACTERS else f"{printable}…"


def is_adapter_name(name: str) -> bool:
    """Whether an adapter may have this name. Other names need no lookup."""
    return _NAME.fullmatch(name) is not None


def check_adapter_name(name: str, base_name: str) -> None:
    """Raises ValidationFailed if `name` cannot be the name of an adapter."""
    if not is_adapter_name(name):
        message = (
            f"'{shown(name)}' cannot be an adapter's name: use 1 to 63 of a-z, 0-9, '.', '_' and '-', "
            "beginning with a letter or a digit."
        )
        raise ValidationFailed(message, param="name", code="invalid_name")
    if name == base_name:
        raise ValidationFailed(f"'{name}' is the base model's name: choose another.", param="name", code="invalid_name")


def check_alias(alias: str) -> None:
    """Raises ValidationFailed if `alias` is malformed or looks like a version."""
    if not _NAME.fullmatch(alias) or alias.isdecimal():
        message = (
            f"'{shown(alias)}' cannot be an alias: use 1 to 63 of a-z, 0-9, '.', '_' and '-', "
            "beginning with a letter or a digit, and not digits alone."
        )
        raise ValidationFailed(message, param="alias", code="invalid_name")


def parse_reference(model: str) -> ModelReference | None:
    """Parse `name`, `name@3` or `name@alias`. None for any other text."""
    name, at, rest = model.partition("@")
    if not _NAME.fullmatch(name):
        return None
    if not at:
        return ModelReference(name)
    if _VERSION.fullmatch(rest):
        return ModelReference(name, version=int(rest))
    if _NAME.fullmatch(rest) and not rest.isdecimal():
        return ModelReference(name, alias=rest)
    return None


def unknown_model(model: str) -> NotFound:
    """The error for an unknown model, a malformed name and another tenant's model. All three look alike."""
    message = f"The model '{shown(model)}' does not exist: GET /v1/models lists those that this key can use."
    return NotFound(message, param="model", code="model_not_found")


def unknown_adapter(name: str) -> NotFound:
    """As `unknown_model`, for the routes that manage adapters."""
    message = f"The adapter '{shown(name)}' does not exist: GET /v1/adapters lists yours."
    return NotFound(message, param="name", code="adapter_not_found")
