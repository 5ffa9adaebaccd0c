"""Defines what an API key allows: scopes, which are groups of routes, and the models that it may name.

Never authenticates a request. Raises NotPermitted, with a message that names what the key lacks.
"""

from collections.abc import Collection, Iterable
from enum import StrEnum

from graftwork.platform.errors import NotPermitted, ValidationFailed

_MOST_ADAPTERS = 100
_MAX_NAME_CHARACTERS = 200


class Scope(StrEnum):
    """A group of routes that a tenant's API key can allow. Models, adapters and timelines need no scope to be read."""

    INFERENCE = "inference"
    """Allows a key to use completions, sessions, responses and everything that these need. Includes `READ`."""
    READ = "read"
    """Allows a key to read sessions, responses and conversations, and to change nothing."""
    ADAPTERS = "adapters"
    """Allows a key to publish, promote and delete adapters."""
    USAGE = "usage"
    """Allows a key to read the tenant's usage, quota and overview."""
    EXPORT = "export"
    """Allows a key to export everything that the tenant has."""


ALL_SCOPES = frozenset(str(scope) for scope in Scope)
_INCLUDED = {Scope.READ: (Scope.READ, Scope.INFERENCE)}
"""The scopes of which one is enough, where it is not the scope itself alone."""


def require_scope(held: Collection[str], needed: Scope) -> None:
    """Raises NotPermitted if a key with the scopes `held` does not allow what needs the scope `needed`."""
    enough = _INCLUDED.get(needed, (needed,))
    if not any(scope in held for scope in enough):
        names = " or ".join(repr(str(scope)) for scope in enough)
        raise NotPermitted(f"This key lacks the scope {names}; use a key that has it.", code="missing_scope")


def checked_scopes(scopes: Collection[str] | None) -> frozenset[str]:
    """Returns the scopes of a new key; None means all. Raises ValidationFailed for a scope that does not exist."""
    if scopes is None:
        return ALL_SCOPES
    unknown = sorted(set(scopes) - ALL_SCOPES)
    if unknown:
        raise ValidationFailed(
            f"There is no scope {unknown[0]!r}; give some of {', '.join(sorted(ALL_SCOPES))}.", param="scopes"
        )
    return frozenset(scopes)


def allows_model(adapters: Collection[str] | None, model: str) -> bool:
    """Returns whether a key with this list of adapters may name `model`: a name, `name@3` or `name@alias`.

    The base model counts as an adapter of its own name. None is a key without a list, which may name all models.
    """
    return adapters is None or model in adapters or model.partition("@")[0] in adapters


def require_models(adapters: Collection[str] | None, models: Iterable[str], param: str | None = "model") -> None:
    """Raises NotPermitted if a key with this list of adapters may not name one of these models.

    The error is the same for models that exist and others, so it tells nothing but what is in the list.
    """
    if adapters is None or all(allows_model(adapters, model) for model in models):
        return
    listed = ", ".join(repr(name) for name in sorted(adapters)) or "none"
    raise NotPermitted(
        f"This key does not allow this model; it allows {listed}. Name one of these, or use another key.",
        code="adapter_not_allowed",
        param=param,
    )


def checked_adapters(adapters: Collection[str] | None) -> frozenset[str] | None:
    """Returns the names that a new key allows; None means all. Raises ValidationFailed for too many or impossible ones.

    A name need not exist yet.
    """
    if adapters is None:
        return None
    if len(adapters) > _MOST_ADAPTERS:
        raise ValidationFailed(f"A key can list at most {_MOST_ADAPTERS} adapters; list fewer.", param="adapters")
    for name in adapters:
        if not name.strip() or len(name) > _MAX_NAME_CHARACTERS or not name.isprintable() or "@" in name:
            raise ValidationFailed(
                "adapters holds names of adapters, without versions and aliases: 'pirate', and not 'pirate@2'.",
                param="adapters",
            )
    return frozenset(adapters)
