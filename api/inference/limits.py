"""How many tokens a request may make, given what its prompt leaves of the context."""

from collections.abc import Sequence

from graftwork.platform.errors import ContextLengthExceeded
from graftwork.platform.tenancy.principals import Principal

ASSUMED_TOKENS = 256
"""What is reserved for an answer without a limit; reserving the rest of the context would spend a small quota on one
short answer. What it makes beyond this is charged when it settles."""


def token_budget(prompts: Sequence[Sequence[int]], asked: int | None, context_tokens: int, param: str) -> int:
    """The `max_tokens` of every choice: what was asked for, or all that the longest prompt leaves.

    Raises ContextLengthExceeded with both numbers if they do not fit.
    """
    prompt_tokens = max(len(prompt) for prompt in prompts)
    if prompt_tokens + (asked or 1) <= context_tokens:
        return asked or context_tokens - prompt_tokens
    wanted = f"the prompt has {prompt_tokens} tokens"
    if asked is not None:
        wanted += f" and {asked} more were asked for, {prompt_tokens + asked} together"
    message = f"This model's context is {context_tokens} tokens, but {wanted}. Shorten the prompt or the answer."
    raise ContextLengthExceeded(message, param=param)


def expected_tokens(asked: int | None, budget: int) -> int:
    """What one choice is reserved for."""
    return budget if asked is not None else min(budget, ASSUMED_TOKENS)


def served_tier(principal: Principal, asked: str | None) -> str:
    """`auto` and nothing are the default tier; the tenant's ceiling caps whatever was asked for."""
    return principal.capped_tier("default" if asked is None or asked == "auto" else asked)
