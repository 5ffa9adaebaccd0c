"""Service tiers as OpenAI's clients name them."""

from graftwork.platform.principals import Principal


def served_tier(principal: Principal, asked: str | None) -> str:
    """`auto` and nothing are the default tier; the tenant's ceiling caps whatever was asked for."""
    return principal.capped_tier("default" if asked is None or asked == "auto" else asked)
